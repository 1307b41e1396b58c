"""An engine behind HTTP, in the OpenAI API's words. Needs the packages of the extra `serve`.

    client -> auth -> bodies -> protocol -> codec -> service (the engine's thread)
    client <------------ streaming <- responses <- pending <-----+

service.py drives the engine from one thread, pending.py holds each caller's outputs; protocol.py
has the types of requests and responses, responses.py fills them; app.py has the routes;
tools/ finds calls of tools in texts; process.py has the process, command.py `onchip serve`.
"""
