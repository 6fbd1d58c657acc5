"""natslog and a NATS server with JetStream, side by side: the same requests must get the same answers."""
