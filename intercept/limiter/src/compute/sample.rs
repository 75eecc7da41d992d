//! What the events of a launch say about its own time.

use crate::compute::Crowd;
use crate::compute::estimates::{Estimates, Key};
use crate::compute::spans::Submission;

/// Slices of another context that may pass within a short kernel, and it still counts as short.
const TURNS_WITHIN_SHORT: u64 = 2;

/// A stream that had nothing to do for so long had given up its turn.
pub(super) const NOTICEABLE_GAP_NS: i64 = 5_000;

/// The resolution of events' times (cuda.h of `cuEventElapsedTime`).
const RESOLUTION_NS: u64 = 500;

/// A launch is long if it takes so many times the CPU time between the submissions.
const EXACT_FROM: u64 = 16;

/// A span as the events tell it, ns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Measured {
    /// From its first event to its last.
    pub(super) wall: u64,
    /// It was queued behind the one before.
    pub(super) follows: bool,
    /// What of `wall` is in the span before too, which ran in another stream.
    pub(super) overlap: u64,
}

/// Company while a span was under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct During {
    pub(super) crowd: Crowd,
    /// What a process with work all the time had of the GPU.
    pub(super) had: Option<u64>,
    /// Nobody from other containers.
    pub(super) only_siblings: bool,
}

/// What the time between the events of a launch says about the launch, ns.
#[derive(Debug, Clone, Copy)]
pub(super) enum Sample {
    /// It took so long.
    Exact(u64),
    /// It took so long, if no other context had the GPU meanwhile; the error is a small part of it.
    Long(u64),
    /// It took about so long, if no other context had the GPU meanwhile.
    Idle(u64),
    /// It took no less and no more.
    Within(u64, u64),
}

/// Tells how long a launch took from the time between its events.
///
/// If the GPU had not come to the first event when all were submitted, they were executed one right
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

/// What of the time between two events was this kernel's. `None` where that cannot be told.
pub(super) fn own_part(
    estimates: &Estimates,
    key: Key,
    measured: Measured,
    company: During,
    slice_ns: u64,
) -> Option<u64> {
    let Measured { wall, follows, .. } = measured;
    if company.crowd.is_nobody() || wall <= slice_ns && !company.only_siblings {
        return Some(wall);
    }
    let known = estimates.known(key);
    // Taken for too little, it would be launched too often before that is known.
    if known.is_none() && wall <= slice_ns {
        return Some(wall);
    }
    // Siblings' turns are no whole slices. What took its usual time had none of them in it.
    let usual = wall <= slice_ns && known.is_some_and(|mean| wall <= mean + mean / 2);
    let even = company.only_siblings && company.had.is_some() && !usual;
    if !even && known.is_some_and(|mean| mean <= slice_ns) {
        // What took longer had turns of others in it, and says nothing. What took much longer was
        // long itself.
        let turns =
            slice_ns * TURNS_WITHIN_SHORT * u64::from(company.crowd.in_256ths().div_ceil(256));
        if wall <= slice_ns {
            return Some(wall);
        }
        if wall <= turns + slice_ns {
            return None;
        }
    }
    let Some(had) = company.had else { return Some(company.crowd.share_of(wall)) };
    if company.only_siblings || follows {
        return Some(had);
    }
    let even = estimates.learn_even(key, had);
    let beyond = wall % slice_ns;
    Some(((even.saturating_sub(beyond) + slice_ns / 2) / slice_ns * slice_ns + beyond).min(wall))
}
