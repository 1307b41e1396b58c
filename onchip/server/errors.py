"""Errors of the API, in the format of OpenAI's error object."""

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

CLIENT_GONE = 499  # nginx's status for a client that hung up; only in logs


class APIError(HTTPException):
    """A request fails with an HTTP status and a message. param: the field at fault. retry_after_s:
    when to try again. closes: the connection ends with the response, because the rest of the
    request is not read.
    """

    status: int
    message: str
    code: str | None
    param: str | None

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
            headers["www-authenticate"] = "Bearer"  # required by RFC 9110
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
        named = {"message": self.message, "type": self.kind}
        return {"error": {**named, "param": self.param, "code": self.code}}


_KINDS = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


def error_response(error: APIError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)
