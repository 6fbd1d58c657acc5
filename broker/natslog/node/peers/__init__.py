"""Links between brokers, and what is sent over them.

`handshake` proves the cluster secret, `keys` derives and seals, `links` keeps a connection to every other broker,
`reception` accepts theirs. `messages` defines the frames, `questions` asks another broker for an answer in pieces.
"""
