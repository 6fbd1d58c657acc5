"""The JetStream API, so that JetStream clients use natslog streams without changes. See docs/JETSTREAM.md."""
