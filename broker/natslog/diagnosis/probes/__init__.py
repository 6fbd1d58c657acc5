"""Functions that collect facts. Each may hang or fail: `natslog.diagnosis.isolation` executes them."""
