"""Links between brokers, and what is sent over them."""
