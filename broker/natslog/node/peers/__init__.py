"""Links between brokers, and what is sent over them.

`handshake` proves the cluster secret, `keys` derives and seals, `links` keeps a connection to every other broker,
`reception` accepts theirs. `messages` defines the frames, `questions` answers requests of other brokers, `requests`
sends them, `pieces` divides long answers.
"""
