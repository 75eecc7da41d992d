//! Starvation avoidance: times at which a node may be reserved for a waiting pod.
//!
//! Reservation windows alternate with pauses of equal length, so a pod that never fits does not
//! block a node all the time.
//!
//! ```text
//! created                                                                       time -->
//! |-- min wait --|= window =|-- pause --|===== window =====|----- pause -----|==== ...
//!                     f           f              2f                 2f          4f
//! ```
//!
//! Windows double up to [`MAX_WINDOW`]. If releasing enough capacity takes some time, a window of
//! that length comes after a small multiple of it. The first window of a pod has a pseudo-random
//! length between [`MIN_FIRST_WINDOW`] and twice that. Otherwise pods created together would share
//! all windows, and the first pod would always get the node.

use crate::model::PodUid;
use crate::policy::seeded_hash;

/// Minimum length of the first window, in seconds. It leaves time for containers to stop and for
/// images to be pulled.
pub(crate) const MIN_FIRST_WINDOW: i64 = 600;

/// Maximum length of a window, in seconds; limits one reservation for capacity that is released
/// later than that.
pub(crate) const MAX_WINDOW: i64 = 8 * 3600;

/// Position in the sequence of reservation windows and pauses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) is_open: bool,
    /// Time of the next change between window and pause, in seconds since the epoch.
    pub(crate) until: i64,
}

/// Returns the length of the first window of a pod, in seconds.
pub(crate) fn first_window_length(pod: &PodUid) -> i64 {
    MIN_FIRST_WINDOW
        + (seeded_hash(0, pod.as_str()) % MIN_FIRST_WINDOW.unsigned_abs()).cast_signed()
}

/// Returns the window or pause at time `now`, for a pod with this first window length.
pub(crate) fn window_at(created: i64, now: i64, min_wait: u32, first: i64) -> Window {
    let mut until = created.saturating_add(i64::from(min_wait));
    let mut is_open = false;
    let mut length = first.max(1);
    let max_length = MAX_WINDOW.max(length);
    while until <= now && until < i64::MAX {
        if !is_open && length == max_length {
            // All further windows and pauses have the same length.
            let period = length.saturating_mul(2);
            until += now.saturating_sub(until) / period * period;
        }
        is_open = !is_open;
        until = until.saturating_add(length);
        if !is_open {
            length = length.saturating_mul(2).min(max_length);
        }
    }
    Window { is_open, until }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_and_pauses_start_after_min_wait_and_double() {
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
        for (now, is_open, until) in table {
            assert_eq!(window_at(1000, now, 300, 10), Window { is_open, until }, "at {now}");
        }
    }

    #[test]
    fn window_length_is_limited_for_old_pods() {
        let year = 365 * 24 * 3600;
        let mut now = 0;
        let mut phases = Vec::new();
        while now < year {
            let Window { is_open, until } = window_at(0, now, 300, 600);
            phases.push((is_open, until - now));
            now = until;
        }
        assert!(
            phases.windows(2).all(|pair| pair[0].0 != pair[1].0),
            "windows and pauses alternate"
        );
        assert!(phases.iter().all(|(_, length)| *length <= MAX_WINDOW));
        assert_eq!(phases.last().unwrap().1, MAX_WINDOW);
    }

    #[test]
    fn end_of_window_is_always_in_the_future() {
        for created in [i64::MIN, -1, 0, 1, i64::MAX] {
            for now in [i64::MIN, 0, 1, i64::MAX - 1] {
                assert!(window_at(created, now, u32::MAX, i64::MAX).until > now, "{created} {now}");
                assert!(window_at(created, now, 0, 0).until > now, "{created} {now}");
            }
        }
    }

    /// Returns the seconds before `end` in which only the second pod has an open window.
    fn seconds_alone(first: &str, second: &str, end: i64) -> i64 {
        let is_open =
            |pod: &str, now| window_at(0, now, 300, first_window_length(&PodUid::new(pod))).is_open;
        (0..end).step_by(60).filter(|now| is_open(second, *now) && !is_open(first, *now)).count()
            as i64
            * 60
    }

    #[test]
    fn pods_created_together_have_different_windows() {
        let day = 24 * 3600;
        assert!(seconds_alone("a", "b", 30 * day) > day);
        assert!(seconds_alone("b", "a", 30 * day) > day);
    }
}
