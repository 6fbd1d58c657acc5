"""Who may do what, and connections that are encrypted and verified.

`records` (tokens, rules, roles, quotas), `decisions` (pure: what rules permit), `guard` (the one place that decides),
`tokens`, `limits` (quotas), `audit` (the audit log). `tls`: contexts of a broker; `certificates`: of `natslog tls
init`.
"""
