"""Why a request gets no answer, as the OpenAI API says it."""

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

CLIENT_GONE = 499  # no status of HTTP: for logs alone, a client that hung up reads none


class APIError(HTTPException):
    """One request fails, with a status of HTTP and a sentence. param: the field at fault.
    retry_after_s: when to ask again. closes: the connection ends with the answer, because the rest
    of the request is not read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        closes: bool = False,
    ):
        headers = {}
        if status == 401:
            headers["www-authenticate"] = "Bearer"  # RFC 9110 wants a 401 to say what would help
        if retry_after_s is not None:
            headers["retry-after"] = str(retry_after_s)
        if closes:
            headers["connection"] = "close"
        super().__init__(status, message, headers)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def kind(self) -> str:
        """The `type` of OpenAI's error object."""
        if self.status in _KINDS:
            return _KINDS[self.status]
        return "server_error" if self.status >= 500 else "invalid_request_error"

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


_KINDS = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


def error_response(error: APIError) -> JSONResponse:
    """The answer."""
    return JSONResponse(error.body, error.status, error.headers)
