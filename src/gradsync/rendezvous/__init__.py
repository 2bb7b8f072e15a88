"""How the processes of a job find each other; ``meet`` is the way in."""

from gradsync.rendezvous.meeting import Meeting, meet, register_rendezvous_handler, rendezvous
from gradsync.rendezvous.member import Member

__all__ = [
    "Meeting",
    "Member",
    "meet",
    "register_rendezvous_handler",
    "rendezvous",
]
