//! GPU time of a launch from its events.

use crate::compute::Contention;
use crate::compute::estimates::{Estimates, Key};
use crate::compute::proportion::in_proportion;
use crate::compute::spans::Submission;

/// Slices of another context within the events of a kernel that still counts as short.
const TURNS_WITHIN_SHORT: u64 = 2;

/// An idle time of a stream after which it has given up its turn.
pub(super) const NOTICEABLE_GAP_NS: i64 = 5_000;

/// The resolution of events' times (cuda.h of `cuEventElapsedTime`).
const RESOLUTION_NS: u64 = 500;

/// A launch is long from this multiple of the CPU time between the submissions.
const EXACT_FROM: u64 = 16;

/// Times of a span by its events, ns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Measured {
    /// Time from its first event to its last.
    pub(super) wall: u64,
    /// True if it was queued behind the span before.
    pub(super) follows: bool,
    /// Part of it that is charged to other launches.
    pub(super) overlap: Overlapped,
    /// Time since the latest end of the spans before; `None` if it is not known.
    pub(super) window: Option<Window>,
}

/// Time of a span that is charged to launches of other streams, ns.
#[derive(Debug, Clone, Copy)]
pub(super) enum Overlapped {
    /// Part of `wall` that is also part of the span before.
    Wall(u64),
    /// GPU time that was charged for launches meanwhile.
    Charged(u64),
}

/// Time in which the launches that a span stands for ran: from the latest end of the spans before
/// to its own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    /// Its length in ns.
    pub(super) elapsed_ns: u64,
    /// True if the process had work all the time.
    pub(super) is_busy: bool,
}

impl Window {
    /// Returns the window without a time in which the GPU waited for the CPU.
    pub(super) const fn without(self, waited_ns: u64) -> Self {
        Self { elapsed_ns: self.elapsed_ns.saturating_sub(waited_ns), ..self }
    }
}

impl Measured {
    /// Returns a span without others before it.
    pub(super) const fn alone(wall: u64) -> Self {
        Self { wall, follows: false, overlap: Overlapped::Wall(0), window: None }
    }

    /// Returns what is left to charge of its GPU time.
    pub(super) const fn without_overlap(self, gpu_ns: u64) -> u64 {
        match self.overlap {
            Overlapped::Charged(charged_ns) => gpu_ns.saturating_sub(charged_ns),
            Overlapped::Wall(0) => gpu_ns,
            // Turns of others are within the overlap as within the rest.
            Overlapped::Wall(overlap) => {
                in_proportion(gpu_ns, self.wall.saturating_sub(overlap), self.wall)
            }
        }
    }
}

/// Contention while a span ran.
#[derive(Debug, Clone, Copy)]
pub(super) struct During {
    pub(super) contention: Contention,
    /// GPU time of a process that always had work.
    pub(super) turn_ns: Option<u64>,
    /// True if no other container had work.
    pub(super) only_siblings: bool,
}

/// GPU time of a launch as far as its events show it, ns.
#[derive(Debug, Clone, Copy)]
pub(super) enum Sample {
    /// This time.
    Exact(u64),
    /// This time if no other context had the GPU meanwhile; the error is a small part of it.
    Long(u64),
    /// About this time if no other context had the GPU meanwhile.
    Idle(u64),
    /// At least the first and at most the second time.
    Within(u64, u64),
}

impl Sample {
    /// Returns the most time that the launch can have had the GPU.
    pub(super) const fn most(self) -> u64 {
        match self {
            Self::Exact(most) | Self::Long(most) | Self::Idle(most) | Self::Within(_, most) => most,
        }
    }
}

/// Returns the GPU time of a launch from the time between its events.
///
/// If the GPU had not reached the first event when all were submitted, they were executed one right
/// behind the other: with the time of an empty pair, `overhead_ns`. Otherwise the GPU may have
/// waited for the CPU between them ("no guarantee that the measured latency is actually just
/// between the two events", cuda.h of `cuEventElapsedTime`): for the launch behind the first event,
/// and for the last event behind a short launch. The first of an idle stream is executed at once,
/// so that the time to the launch is known, even if the thread was preempted meanwhile.
pub(super) const fn sample(wall: u64, submission: Submission, overhead_ns: u64) -> Sample {
    if submission.was_queued {
        return Sample::Exact(wall.saturating_sub(overhead_ns));
    }
    let to_launch = submission.launched.saturating_sub(submission.before);
    let to_behind = submission.behind.saturating_sub(submission.launched);
    let own = wall.saturating_sub(to_launch);
    let submitting = to_launch.saturating_add(to_behind);
    let is_longer = own > to_behind.saturating_add(RESOLUTION_NS);
    if own >= submitting.saturating_mul(EXACT_FROM) {
        return Sample::Long(own);
    }
    match submission.was_idle {
        true if is_longer => Sample::Idle(own),
        true => Sample::Within(0, own),
        false if is_longer => Sample::Within(own - own / 8 - RESOLUTION_NS / 2, wall),
        false => Sample::Within(0, wall),
    }
}

/// Returns the part of the time between two events that was this kernel's. `None` if it cannot be
/// told apart.
pub(super) fn own_part(
    estimates: &Estimates,
    key: Key,
    measured: Measured,
    during: During,
    slice_ns: u64,
) -> Option<u64> {
    let Measured { wall, follows, .. } = measured;
    if during.contention.is_negligible() || wall <= slice_ns && !during.only_siblings {
        return Some(wall);
    }
    let known = estimates.known(key);
    // With too small an estimate it would be launched too often until it is measured again.
    if known.is_none() && wall <= slice_ns {
        return Some(wall);
    }
    // Turns of siblings are not whole slices. A kernel that took its usual time contains none.
    let usual = wall <= slice_ns && known.is_some_and(|mean| wall <= mean + mean / 2);
    let even = during.only_siblings && during.turn_ns.is_some() && !usual;
    if !even && known.is_some_and(|mean| mean <= slice_ns) {
        // A longer time contains turns of others and is no sample. A much longer time is of a long
        // kernel.
        let turns = slice_ns * TURNS_WITHIN_SHORT * during.contention.contexts();
        if wall <= slice_ns {
            return Some(wall);
        }
        if wall <= turns + slice_ns {
            return None;
        }
    }
    // If the program saw the end late, the turn has gone on.
    let Some(turn_ns) = during.turn_ns.filter(|turn_ns| turn_ns / 2 <= wall) else {
        return Some(during.contention.share_of(wall));
    };
    if during.only_siblings || follows {
        return Some(turn_ns);
    }
    let even = estimates.learn_even(key, turn_ns);
    // Contexts that do not always have work give up their turns before the end of the slice.
    if during.contention.is_partial() {
        return Some(even.min(wall));
    }
    let beyond = wall % slice_ns;
    Some(((even.saturating_sub(beyond) + slice_ns / 2) / slice_ns * slice_ns + beyond).min(wall))
}

/// Returns the GPU time of a launch in an idle stream that is done after `wall_ns`, beside other
/// contexts: an idle context gives up its turn, so that the others have theirs first. `None` if the
/// others did not have their whole turns.
pub(super) fn own_after_turns(wall_ns: u64, slice_ns: u64, others: u64) -> Option<u64> {
    let turns = slice_ns.saturating_mul(others);
    if wall_ns <= turns {
        return None;
    }
    let (own_from, period) = (wall_ns - turns, turns.saturating_add(slice_ns));
    Some(own_from / period * slice_ns + (own_from % period).min(slice_ns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_of_others_are_not_part_of_a_launch() {
        let own = |wall| own_after_turns(wall, 2_000, 1);
        assert_eq!((own(2_020), own(4_000), own(80_000)), (Some(20), Some(2_000), Some(40_000)));
        assert_eq!((own(1_999), own(5_000)), (None, Some(2_000)));
        assert_eq!(own_after_turns(6_500, 2_000, 3), Some(500));
        assert_eq!(own_after_turns(u64::MAX, u64::MAX, 9), None);
    }
}
