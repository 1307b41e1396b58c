"""Why a request gets no answer, as the OpenAI API says it."""


class Refusal(Exception):
    """One request fails, with a status of HTTP and a sentence. param: the field at fault.
    retry_after_s: when to ask again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s = retry_after_s

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

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}  # RFC 9110 wants a 401 to say what would help
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


_KINDS = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
