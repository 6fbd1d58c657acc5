"""Streams as files declare them: `natslog apply`.

    files ──▶ reading ──▶ Declared ──▶ plan ──▶ Planned ──▶ applying ──▶ Outcome
                          streams of the cluster ──┘   writing ──▶ a file

`plan` is pure: it compares what the files state with what the cluster lists. `applying` sends the changes, each on the
condition that the stream still has the id and the version of settings that the plan was made for.
"""
