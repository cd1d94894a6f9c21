"""What is wrong with a store and its database: checks that look, and verdicts with one sentence of advice each.

`general` holds what is asked of every database, `postgresql`, `horizon` and `sqlite` what is asked of one; nothing here changes
anything, but `restored`, which is asked for by name.
"""

from alkstore_sa.doctor.examination import examine
from alkstore_sa.doctor.restored import raise_ids
from alkstore_sa.doctor.verdicts import Level, Limits, Verdict

__all__ = ["Level", "Limits", "Verdict", "examine", "raise_ids"]
