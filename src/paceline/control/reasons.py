"""Why a row drafts nothing. The values are public: labels of the server metrics and keys of `Stats.reasons`."""

from enum import StrEnum


class NoDraftReason(StrEnum):
    PARKED_BY_COST = "parked by cost"  # no acceptance would pay at this load
    NO_CONFIDENCE = "no confidence"  # this request's drafts are kept too rarely to pay
    GIVEN_UP = "given up"  # this text, or those before it, had nothing of the drafter: it goes on without
    NO_PROPOSAL = "no proposal"  # the drafter had nothing to say
    DISABLED = "disabled by request"
    NO_ROOM = "budget"  # the request ends before a draft could be kept
    MEMORY = "memory"
    DRAFTER_MEMORY = "drafter memory"  # the drafter's own cache has no room for this text
    NO_STATES = "no hidden states"  # the drafter has not got the target's hidden states of all of this text
    BLIND = "drafter cannot see pictures"  # the text has some, and the drafter reads tokens alone
    PREFILL = "prefill"
    DRAFTER_FAILED = "drafter failed"
    NO_DRAFTER = "no drafter"
    MEASURING = "measuring"  # a plain reference step amid drafted ones
