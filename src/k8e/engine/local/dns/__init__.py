"""Names for sandboxes. Those on a sandbox's list are asked for upstream, their addresses are filtered, made known to
the kernel and only then answered; all others never leave the machine and are refused at once.

    resolv_conf   which servers to ask                 queries      what a sandbox sends
    upstream      asking them; cache: remembering      answers      what upstream sends, what a sandbox gets
    rate_limits   how much a sandbox may ask           decisions    what becomes of a query
    listeners     its sockets                          resolution   one query from packet to packet
    server        all of it together
"""
