"""How the processes of a job find each other; ``meet`` is the way in."""

from gradsync.rendezvous.meeting import Meeting, meet, register_rendezvous_handler, rendezvous
from gradsync.rendezvous.member import Member
from gradsync.rendezvous.topology import HostEvidence, host_evidence, islands

__all__ = [
    "HostEvidence",
    "Meeting",
    "Member",
    "host_evidence",
    "islands",
    "meet",
    "register_rendezvous_handler",
    "rendezvous",
]
