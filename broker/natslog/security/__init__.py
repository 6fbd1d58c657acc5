"""Who may do what to which stream, and over which connections: TLS."""
