"""Asks the API server whose a token is (TokenReview). Implements `core.access.accounts.TokenReviews`."""

from __future__ import annotations

from typing import Final

from lightkube.models.authentication_v1 import TokenReviewSpec, TokenReviewStatus
from lightkube.resources.authentication_v1 import TokenReview

from k8e.core.access.accounts import Verdict, review_unavailable
from k8e.engine.kubernetes.api import Api, ApiError, ApiRefused

_USER: Final = "system:serviceaccount:"
_RIGHTS: Final = "kubectl apply -f deploy/kubernetes/tokens.yaml gives the gateway the right to ask."


class ServerReviews:
    def __init__(self, api: Api, audience: str) -> None:
        """`api`: one without a guard. Nothing is changed by asking."""
        self._api = api
        self.audience = audience

    async def review(self, token: str) -> Verdict:
        spec = TokenReviewSpec(token=token, audiences=[self.audience])
        try:
            answer = await self._api.create_global(
                TokenReview(apiVersion="authentication.k8s.io/v1", kind="TokenReview", spec=spec)
            )
        except ApiRefused as refused:
            raise review_unavailable(str(refused), *([_RIGHTS] if refused.code == 403 else [])) from refused
        except ApiError as error:
            raise review_unavailable(str(error)) from error
        return read_status(answer.status, self.audience)

    async def close(self) -> None:
        await self._api.close()


def read_status(status: TokenReviewStatus | None, audience: str) -> Verdict:
    """A token that is good for another audience alone, and users that are no service accounts, are no good here."""
    if status is None or not status.authenticated:
        return Verdict(cause=(status.error if status else "") or "the cluster does not know it")
    if audience not in (status.audiences or ()):
        # As the API asks of its users: a server that does not know of audiences names none.
        return Verdict(cause=f"the cluster does not say that it is for {audience}")
    user = (status.user.username if status.user else "") or ""
    namespace, colon, name = user.removeprefix(_USER).partition(":")
    if not user.startswith(_USER) or not colon or not namespace or not name:
        return Verdict(cause="it is no service account's")
    return Verdict(namespace, name)
