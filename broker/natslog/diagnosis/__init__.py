"""What is wrong with an installation, and what to send to an engineer: `natslog doctor` and `natslog support-bundle`.

Theory of operation. *Probes* collect facts (of the machine, the data folder, NATS, the cluster). Each is executed in a
process of its own, with a time limit (`isolation`): one that hangs or fails leaves its facts out. *Checks* are pure
functions of the facts; all are listed in `doctor.CHECKS`. A check whose facts are missing is reported as not checked.
"""
