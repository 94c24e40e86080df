"""The management port: HTTP for bootstrap, buckets, collections, cluster members and faults.

``wire`` turns bytes into requests and answers (h11 parses), ``server`` checks who may do what and finds the route,
``routes`` imports the modules that have routes. Limits on sizes and times hold for everybody.
"""
