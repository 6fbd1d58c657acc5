"""`python -m natslog` is `natslog`."""

from natslog.cli import main

main()
