"""`natslog support-bundle`: an archive for an engineer who helps. It has no payloads and no secrets.

Theory of operation. Nothing gets into the archive because it is there: of each answer of a broker, setting, metric and
event only the fields of an allow-list (`allowed`) are taken, and each has a kind that limits what it may contain. Of
logs only lines in the forms of natslog and of the NATS server are taken. Texts for people pass `redaction`, which
removes what looks like a secret, and every secret that this machine has in files, URLs and variables. The names of all
files in the archive are chosen here.
"""
