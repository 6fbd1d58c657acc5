"""natslog: durable, replayable streams for people who run NATS, and Spark on top of them."""
