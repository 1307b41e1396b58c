"""Several replicas of the server behind one address, on Ray Serve. Needs the packages of the extra
`ray`.

    client -> gateway (auth, body, keys of the prompt) -> router -> replica (app.Server) -> engine
    client <------------------------- ASGI messages <---------------+

gateway.py is the HTTP application in front; prompts.py and balancer.py decide which replica gets a
request, without Ray; router.py hands the decision to Ray Serve; replica.py runs the server in a
process of Ray; relay.py passes its responses on; metrics.py merges the metrics of all replicas;
cluster.py starts, scales and ends them. Placement, restarts, health checks and draining are Ray
Serve's.
"""
