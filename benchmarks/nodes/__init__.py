"""Training over several hosts: what goes over the link, how long a minibatch takes, what it needs in memory."""
