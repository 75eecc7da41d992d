//! When a pod that has to wait may have a node kept free for it: by turns, so that a pod that never
//! fits does not keep others from a node for ever.
//!
//! ```text
//! created                                                                        time -->
//! |-- patience --|== turn ==|-- pause --|====== turn ======|------ pause ------|==== ...
//!                     f          f               2f                  2f           4f
//! ```
//!
//! Whatever time it takes until enough is given back, up to [`LONGEST`], some turn is as long, and
//! it comes when a few times as much has passed.
//! Of each turn with the pause after it, others have half. The first turn of a pod is by lot
//! between [`FIRST`] and twice that, or pods created together would have all turns together, and
//! the second would always find the first before it.

use crate::model::PodUid;
use crate::policy::lot;

/// Seconds of the shortest first turn. Containers need some to end, and their images to be pulled,
/// before a turn is of use.
pub(crate) const FIRST: i64 = 600;

/// Seconds of the longest turn. What takes longer to end is not waited for in vain any longer than
/// this at a time.
pub(crate) const LONGEST: i64 = 8 * 3600;

/// Whether it is a pod's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) is_on: bool,
    /// When that changes, in seconds since the epoch.
    pub(crate) until: i64,
}

/// The first turn of a pod, in seconds.
pub(crate) fn first_turn(pod: &PodUid) -> i64 {
    FIRST + (lot(0, pod.as_str()) % FIRST.unsigned_abs()).cast_signed()
}

/// Whether it is the turn of a pod of this age, whose first turn is so long.
pub(crate) fn turn(created: i64, now: i64, patience: u32, first: i64) -> Turn {
    let mut until = created.saturating_add(i64::from(patience));
    let mut is_on = false;
    let mut length = first.max(1);
    let longest = LONGEST.max(length);
    while until <= now && until < i64::MAX {
        if !is_on && length == longest {
            // Every turn with its pause is as long as the next.
            let round = length.saturating_mul(2);
            until += now.saturating_sub(until) / round * round;
        }
        is_on = !is_on;
        until = until.saturating_add(length);
        if !is_on {
            length = length.saturating_mul(2).min(longest);
        }
    }
    Turn { is_on, until }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_and_pauses_begin_after_patience_and_double() {
        let table = [
            (0, false, 1300),
            (1299, false, 1300),
            (1300, true, 1310),
            (1309, true, 1310),
            (1310, false, 1320),
            (1319, false, 1320),
            (1320, true, 1340),
            (1340, false, 1360),
            (1360, true, 1400),
            (1400, false, 1440),
            (1440, true, 1520),
            (i64::MIN, false, 1300),
        ];
        for (now, is_on, until) in table {
            assert_eq!(turn(1000, now, 300, 10), Turn { is_on, until }, "at {now}");
        }
    }

    #[test]
    fn no_turn_is_longer_than_the_longest_and_old_pods_take_no_longer_to_judge() {
        let year = 365 * 24 * 3600;
        let mut now = 0;
        let mut turns = Vec::new();
        while now < year {
            let Turn { is_on, until } = turn(0, now, 300, 600);
            turns.push((is_on, until - now));
            now = until;
        }
        assert!(turns.windows(2).all(|pair| pair[0].0 != pair[1].0), "turns and pauses alternate");
        assert!(turns.iter().all(|(_, length)| *length <= LONGEST));
        assert_eq!(turns.last().unwrap().1, LONGEST);
    }

    #[test]
    fn any_times_give_a_turn_that_lies_ahead() {
        for created in [i64::MIN, -1, 0, 1, i64::MAX] {
            for now in [i64::MIN, 0, 1, i64::MAX - 1] {
                assert!(turn(created, now, u32::MAX, i64::MAX).until > now, "{created} {now}");
                assert!(turn(created, now, 0, 0).until > now, "{created} {now}");
            }
        }
    }

    /// For how long, together, the second pod has its turn and the first has not, up to the end of
    /// time.
    fn alone(first: &str, second: &str, end: i64) -> i64 {
        let is_on = |pod: &str, now| turn(0, now, 300, first_turn(&PodUid::new(pod))).is_on;
        (0..end).step_by(60).filter(|now| is_on(second, *now) && !is_on(first, *now)).count() as i64
            * 60
    }

    #[test]
    fn of_pods_created_together_each_has_turns_that_the_other_has_not() {
        let day = 24 * 3600;
        assert!(alone("a", "b", 30 * day) > day);
        assert!(alone("b", "a", 30 * day) > day);
    }
}
