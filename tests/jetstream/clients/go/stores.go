// Key-value buckets and object stores.
package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// ---- key-value ----

func keyValue(s *seen) {
	_, err := s.js.KeyValue(s.ctx, "KV1")
	s.sawError("no bucket", err)
	config := jetstream.KeyValueConfig{Bucket: "KV1", History: 5, Description: "of tests"}
	bucket := must(s.js.CreateKeyValue(s.ctx, config))
	_, err = s.js.CreateKeyValue(s.ctx, config)
	s.sawError("create bucket, the same", err)
	config.History = 6
	_, err = s.js.CreateKeyValue(s.ctx, config)
	s.sawError("create bucket, another", err)
	config.History = 5
	_, err = s.js.CreateOrUpdateKeyValue(s.ctx, config)
	s.sawError("create or update bucket", err)
	s.sawStatus("status, empty", bucket)
	keys, err := bucket.Keys(s.ctx)
	s.sawOf("keys, none", keys, err)
	s.sawEntry("get, missing", bucket, "a", 0)
	s.sawRevision("put")(bucket.PutString(s.ctx, "a", "1"))
	s.sawEntry("get", bucket, "a", 0)
	s.sawRevision("create, exists")(bucket.Create(s.ctx, "a", []byte("2")))
	s.sawRevision("create")(bucket.Create(s.ctx, "b.c", []byte("3")))
	s.sawRevision("update, right revision")(bucket.Update(s.ctx, "a", []byte("4"), 1))
	s.sawRevision("update, wrong revision")(bucket.Update(s.ctx, "a", []byte("5"), 1))
	s.sawEntry("get, old revision", bucket, "a", 1)
	s.sawEntry("get, revision of another key", bucket, "a", 2)
	s.sawRevision("put, 0 bytes")(bucket.Put(s.ctx, "empty", nil))
	s.sawEntry("get, 0 bytes", bucket, "empty", 0)
	s.sawError("delete, wrong revision", bucket.Delete(s.ctx, "a", jetstream.LastRevision(1)))
	s.sawError("delete", bucket.Delete(s.ctx, "a", jetstream.LastRevision(3)))
	s.sawEntry("get, deleted", bucket, "a", 0)
	s.sawHistory("history, deleted", bucket, "a")
	s.sawRevision("create, deleted")(bucket.Create(s.ctx, "a", []byte("6")))
	for at := range 4 {
		must(bucket.PutString(s.ctx, "a", fmt.Sprint("7.", at)))
	}
	s.sawHistory("history, of five", bucket, "a")
	s.sawError("purge", bucket.Purge(s.ctx, "b.c"))
	s.sawEntry("get, purged", bucket, "b.c", 0)
	s.sawHistory("history, purged", bucket, "b.c")
	s.sawHistory("history, missing", bucket, "nothing")
	keys, err = bucket.Keys(s.ctx)
	s.sawOf("keys", keys, err)
	s.sawKeys("list keys")(bucket.ListKeys(s.ctx))
	s.sawKeys("list keys, filtered")(bucket.ListKeysFiltered(s.ctx, "e*", "empty", "b.>"))
	s.sawStatus("status", bucket)
	s.sawError("purge deletes", bucket.PurgeDeletes(s.ctx, jetstream.DeleteMarkersOlderThan(-1)))
	s.sawStatus("status, after purge of deletes", bucket)
	must(s.js.CreateKeyValue(s.ctx, jetstream.KeyValueConfig{Bucket: "KV1b"}))
	names := []string{}
	for name := range s.js.KeyValueStoreNames(s.ctx).Name() {
		names = append(names, name)
	}
	slices.Sort(names)
	s.saw("names of buckets", names)
	s.sawError("delete bucket", s.js.DeleteKeyValue(s.ctx, "KV1"))
	s.sawError("delete bucket, missing", s.js.DeleteKeyValue(s.ctx, "KV1"))
	s.sawError("delete another", s.js.DeleteKeyValue(s.ctx, "KV1b"))
}

func (s *seen) sawStatus(step string, bucket jetstream.KeyValue) {
	status, err := bucket.Status(s.ctx)
	if err != nil {
		s.sawError(step, err)
		return
	}
	info := status.(*jetstream.KeyValueBucketStatus).StreamInfo()
	s.saw(step, []any{status.Bucket(), status.Values(), status.Bytes(), settingsOf(info), stateOf(info)})
}

func (s *seen) sawRevision(step string) func(uint64, error) {
	return func(revision uint64, err error) { s.sawOf(step, revision, err) }
}

func (s *seen) sawEntry(step string, bucket jetstream.KeyValue, key string, revision uint64) {
	var entry jetstream.KeyValueEntry
	var err error
	if revision == 0 {
		entry, err = bucket.Get(s.ctx, key)
	} else {
		entry, err = bucket.GetRevision(s.ctx, key, revision)
	}
	if err != nil {
		s.sawError(step, err)
		return
	}
	s.saw(step, entryOf(entry))
}

func (s *seen) sawHistory(step string, bucket jetstream.KeyValue, key string) {
	entries, err := bucket.History(s.ctx, key)
	found := []any{}
	for _, entry := range entries {
		found = append(found, entryOf(entry))
	}
	s.sawOf(step, found, err)
}

func (s *seen) sawKeys(step string) func(jetstream.KeyLister, error) {
	return func(lister jetstream.KeyLister, err error) {
		check(err)
		found := []string{}
		for key := range lister.Keys() {
			found = append(found, key)
		}
		s.saw(step, found)
	}
}

func entryOf(entry jetstream.KeyValueEntry) fields {
	found := liveEntryOf(entry)
	if found != nil {
		found["delta"] = entry.Delta()
	}
	return found
}

// liveEntryOf is without `delta`, which depends on time.
func liveEntryOf(entry jetstream.KeyValueEntry) fields {
	if entry == nil {
		return nil
	}
	return fields{
		"bucket":    entry.Bucket(),
		"key":       entry.Key(),
		"value":     string(entry.Value()),
		"revision":  entry.Revision(),
		"operation": entry.Operation().String(),
	}
}

func keyValueWatch(s *seen) {
	bucket := must(s.js.CreateKeyValue(s.ctx, jetstream.KeyValueConfig{Bucket: "KV2", History: 3}))
	watcher := must(bucket.WatchAll(s.ctx))
	s.saw("watch all, empty", untilMarker(watcher))
	for _, key := range []string{"a", "b", "c", "a"} {
		must(bucket.PutString(s.ctx, key, key))
	}
	check(bucket.Delete(s.ctx, "b"))
	updated := updatesOf(watcher, 5) // a purge removes what the watcher has not received yet
	check(bucket.Purge(s.ctx, "c"))
	s.saw("watch all, updates", append(updated, updatesOf(watcher, 1)...))
	check(watcher.Stop())

	present := func(step, keys string, options ...jetstream.WatchOpt) {
		watcher := must(bucket.Watch(s.ctx, keys, options...))
		s.saw(step, untilMarker(watcher))
		check(watcher.Stop())
	}
	present("watch all, present", ">")
	present("watch all, without deletes", ">", jetstream.IgnoreDeletes())
	present("watch all, with history", ">", jetstream.IncludeHistory())
	present("watch all, headers only", ">", jetstream.MetaOnly())
	present("watch all, from a revision", ">", jetstream.ResumeFromRevision(4))
	present("watch a missing key", "nothing")
	several := must(bucket.WatchFiltered(s.ctx, []string{"a", "c"}))
	s.saw("watch two keys", untilMarker(several))
	check(several.Stop())

	watcher = must(bucket.Watch(s.ctx, "a", jetstream.IncludeHistory()))
	s.saw("watch a key, with history", untilMarker(watcher))
	updates := must(bucket.WatchAll(s.ctx, jetstream.UpdatesOnly()))
	must(bucket.PutString(s.ctx, "b", "other"))
	must(bucket.PutString(s.ctx, "a", "own"))
	s.saw("watch a key, updates", updatesOf(watcher, 1))
	s.saw("watch updates only", updatesOf(updates, 2))
	check(watcher.Stop())
	check(updates.Stop())
}

func untilMarker(watcher jetstream.KeyWatcher) []fields {
	found := []fields{}
	for {
		entry := next(watcher.Updates(), "an entry of a watcher")
		found = append(found, entryOf(entry))
		if entry == nil {
			return found
		}
	}
}

func updatesOf(watcher jetstream.KeyWatcher, number int) []fields {
	found := []fields{}
	for range number {
		found = append(found, liveEntryOf(next(watcher.Updates(), "an update of a watcher")))
	}
	return found
}

// ---- objects ----

func objects(s *seen) {
	_, err := s.js.ObjectStore(s.ctx, "OBJ1")
	s.sawError("no bucket", err)
	store := must(s.js.CreateObjectStore(s.ctx, jetstream.ObjectStoreConfig{Bucket: "OBJ1", Description: "of tests"}))
	s.sawObjects("list, empty")(store.List(s.ctx))
	watcher := must(store.Watch(s.ctx))
	s.saw("watch, empty", comparable(next(watcher.Updates(), "the marker of a watcher")))
	large := bytes.Repeat([]byte("0123456789abcdef"), 300*1024/16)
	meta := jetstream.ObjectMeta{Name: "large", Description: "three chunks", Headers: nats.Header{"A": {"1"}}}
	s.sawObject("put, 300 KiB")(store.Put(s.ctx, meta, bytes.NewReader(large)))
	s.sawObject("put, 0 bytes")(store.PutBytes(s.ctx, "empty", nil))
	small := jetstream.ObjectMeta{Name: "small", Opts: &jetstream.ObjectMetaOptions{ChunkSize: 4}}
	s.sawObject("put, 10 bytes, chunks of 4")(store.Put(s.ctx, small, strings.NewReader("0123456789")))
	for _, name := range []string{"large", "empty", "small"} {
		s.sawContent("get, "+name, store, name)
	}
	s.sawObject("put, 8 MiB")(store.PutBytes(s.ctx, "many", make([]byte, 8<<20)))
	s.sawContent("get, 8 MiB, with flow control", store, "many")
	s.sawError("delete, 8 MiB", store.Delete(s.ctx, "many"))
	s.sawObject("info")(store.GetInfo(s.ctx, "large"))
	s.sawObject("info, missing")(store.GetInfo(s.ctx, "nothing"))
	s.sawContent("get, missing", store, "nothing")
	info := must(store.GetInfo(s.ctx, "small"))
	s.sawObject("link")(store.AddLink(s.ctx, "to small", info))
	s.sawContent("get, link", store, "to small")
	other := must(s.js.CreateObjectStore(s.ctx, jetstream.ObjectStoreConfig{Bucket: "OBJ2"}))
	s.sawObject("link to a bucket")(store.AddBucketLink(s.ctx, "to other", other))
	s.sawContent("get, link to a bucket", store, "to other")
	s.sawObject("overwrite")(store.PutString(s.ctx, "large", "small now"))
	s.sawContent("get, overwritten", store, "large")
	s.sawObjects("list")(store.List(s.ctx))
	s.sawError("update meta", store.UpdateMeta(s.ctx, "small", jetstream.ObjectMeta{Name: "renamed"}))
	s.sawObject("info, renamed")(store.GetInfo(s.ctx, "renamed"))
	s.sawError("delete", store.Delete(s.ctx, "large"))
	s.sawError("delete, missing", store.Delete(s.ctx, "nothing"))
	s.sawObject("info, deleted")(store.GetInfo(s.ctx, "large"))
	s.sawObject("info, deleted is shown")(store.GetInfo(s.ctx, "large", jetstream.GetObjectInfoShowDeleted()))
	s.sawObjects("list, without deleted")(store.List(s.ctx))
	s.sawObjects("list, with deleted")(store.List(s.ctx, jetstream.ListObjectsShowDeleted()))
	updates := []any{}
	for range 10 {
		updates = append(updates, comparable(next(watcher.Updates(), "an update of a watcher")))
	}
	s.saw("watch, updates", updates)
	check(watcher.Stop())
	s.sawError("seal", store.Seal(s.ctx))
	s.sawObject("put, sealed")(store.PutString(s.ctx, "more", "x"))
	status := must(store.Status(s.ctx))
	s.saw("status", settingsOf(status.(*jetstream.ObjectBucketStatus).StreamInfo()))
	s.sawError("delete bucket", s.js.DeleteObjectStore(s.ctx, "OBJ1"))
	s.sawError("delete bucket, missing", s.js.DeleteObjectStore(s.ctx, "OBJ1"))
}

func (s *seen) sawObject(step string) func(*jetstream.ObjectInfo, error) {
	return func(info *jetstream.ObjectInfo, err error) { s.sawOf(step, comparable(info), err) }
}

func (s *seen) sawObjects(step string) func([]*jetstream.ObjectInfo, error) {
	return func(infos []*jetstream.ObjectInfo, err error) { s.sawOf(step, comparable(infos), err) }
}

func (s *seen) sawContent(step string, store jetstream.ObjectStore, name string) {
	result, err := store.Get(s.ctx, name)
	if err != nil {
		s.sawError(step, err)
		return
	}
	content, err := io.ReadAll(result)
	info := must(result.Info())
	s.sawOf(step, fields{
		"info": comparable(info), "bytes": len(content), "sha256": fmt.Sprintf("%x", sha256.Sum256(content)),
	}, err)
	check(result.Error())
}
