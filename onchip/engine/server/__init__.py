"""An engine behind HTTP, in the OpenAI API's words. Needs the packages of the extra `serve`.

service.py drives the engine from one thread, for the callers of pending.py; protocol.py says what
may be asked, responses.py what is answered; auth.py and keys.py stand at the door, streaming.py at the
connection; app.py has the routes, run.py the process, command.py `onchip serve`.
"""
