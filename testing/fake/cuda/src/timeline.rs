//! End times of GPU work.
//!
//! Time is real time since the first call, in nanoseconds. The length of work is modelled and
//! scaled by the world's `time.scale`. Kernels of this process run at the same time as far as their
//! blocks fit on the multiprocessors; a kernel starts at the earliest time at which it fits beside
//! those queued before it. Streams share hardware channels: work that waits for its stream delays
//! the later work of its channel. Other processes do not slow a GPU down.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

/// Part of a GPU's multiprocessors, in percent, from 1 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fill(u32);

impl Fill {
    pub(crate) const ALL: Self = Self(100);

    /// Returns the part that blocks fill if `at_once` fit on the GPU.
    pub(crate) fn of(blocks: u64, at_once: u64) -> Self {
        let percent = blocks.saturating_mul(100).div_ceil(at_once.max(1));
        Self(u32::try_from(percent).unwrap_or(100).clamp(1, 100))
    }
}

/// Work of a GPU.
#[derive(Debug, Default, Clone)]
pub(crate) struct Timeline {
    /// Percent of the multiprocessors in use, from each time to the next; 0 from the last one on.
    filled: BTreeMap<u64, u32>,
    copies: u64,
    /// Start time of the last kernel of each hardware channel.
    channels: [u64; CHANNELS],
}

/// Number of hardware channels: the default of `CUDA_DEVICE_MAX_CONNECTIONS`.
const CHANNELS: usize = 8;

/// Engine that executes work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    /// Multiprocessors.
    Kernels(Fill),
    /// Copy engine.
    Copies,
}

/// Queued work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Queued {
    /// Its end time.
    pub(crate) end: u64,
    /// Nanoseconds in which no other kernel runs that was queued before it; 0 for copies.
    pub(crate) added: u64,
}

impl Timeline {
    /// Queues work behind the work of its stream, which ends at `stream_end`, for as long as
    /// `length`.
    pub(crate) fn queue(
        &mut self,
        engine: Engine,
        channel: usize,
        stream_end: u64,
        length: Duration,
    ) -> Queued {
        let length = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
        let present = now();
        let ready = present.max(stream_end);
        match engine {
            Engine::Kernels(fill) => {
                let started = &mut self.channels[channel % CHANNELS];
                let ready = ready.max(*started);
                let start = earliest(&self.filled, ready, length, 100 - fill.0);
                *started = start;
                let end = start.saturating_add(length);
                forget_before(&mut self.filled, present);
                let added = occupy(&mut self.filled, start, end, fill.0);
                Queued { end, added }
            }
            Engine::Copies => {
                self.copies = ready.max(self.copies).saturating_add(length);
                Queued { end: self.copies, added: 0 }
            }
        }
    }

    /// Returns the end time of all work.
    pub(crate) fn end(&self) -> u64 {
        self.filled.last_key_value().map_or(0, |(end, _)| *end).max(self.copies)
    }
}

/// Returns the earliest time from `ready` on, from which at most `most` percent are in use for
/// `length`.
fn earliest(filled: &BTreeMap<u64, u32>, ready: u64, length: u64, most: u32) -> u64 {
    let mut start = ready;
    let current = filled.range(..=ready).next_back().map_or(0, |(_, percent)| *percent);
    let mut is_free = current <= most;
    for (&from, &percent) in filled.range(ready.saturating_add(1)..) {
        if is_free && from >= start.saturating_add(length) {
            return start;
        }
        if percent > most {
            is_free = false;
        } else if !is_free {
            (start, is_free) = (from, true);
        }
    }
    start
}

/// Forgets the time before the present.
fn forget_before(filled: &mut BTreeMap<u64, u32>, present: u64) {
    let current = filled.range(..=present).next_back().map(|(_, percent)| *percent);
    if let Some(current) = current {
        *filled = filled.split_off(&present);
        filled.entry(present).or_insert(current);
    }
}

/// Adds percent from a time to another, and returns the nanoseconds in which none were in use.
fn occupy(filled: &mut BTreeMap<u64, u32>, start: u64, end: u64, percent: u32) -> u64 {
    if start == end {
        return 0;
    }
    for time in [start, end] {
        let before = filled.range(..=time).next_back().map_or(0, |(_, percent)| *percent);
        filled.entry(time).or_insert(before);
    }
    let mut added = 0;
    let mut last = None;
    for (&from, in_use) in filled.range_mut(start..end) {
        added += last.map_or(0, |last| from - last);
        last = (*in_use == 0).then_some(from);
        *in_use += percent;
    }
    added + last.map_or(0, |last| end - last)
}

/// Returns the nanoseconds since the first call.
pub(crate) fn now() -> u64 {
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    u64::try_from(BEGIN.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Waits until `end`.
#[expect(clippy::disallowed_methods, reason = "a deadline: the modelled end of GPU work")]
pub(crate) fn wait_until(end: u64) {
    if let Some(left) = end.checked_sub(now()) {
        thread::sleep(Duration::from_nanos(left));
    }
}

/// Busy-waits, as for the CPU time of a launch, which is too short to sleep.
pub(crate) fn spin(length: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < length {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Far from now, which the tests do not depend on.
    const BEGIN: u64 = 1 << 60;

    fn kernel(fill: u32, length: u64) -> (Engine, Duration) {
        (Engine::Kernels(Fill(fill)), Duration::from_nanos(length))
    }

    /// Queues kernels, each in a stream and a channel of its own, and returns their end times after
    /// the begin, and what they add.
    fn queue(kernels: &[(Engine, Duration)]) -> Vec<(u64, u64)> {
        let mut timeline = Timeline::default();
        let queued = kernels.iter().enumerate().map(|(channel, (engine, length))| {
            let queued = timeline.queue(*engine, channel, BEGIN, *length);
            (queued.end - BEGIN, queued.added)
        });
        queued.collect()
    }

    #[test]
    fn kernels_run_at_the_same_time_as_far_as_they_fit() {
        let kernels = [kernel(60, 100), kernel(40, 150), kernel(30, 50), kernel(100, 10)];
        assert_eq!(queue(&kernels), [(100, 100), (150, 50), (150, 0), (160, 10)]);
    }

    #[test]
    fn small_kernel_runs_beside_those_before_it() {
        let kernels = [kernel(90, 100), kernel(100, 100), kernel(10, 100), kernel(10, 101)];
        assert_eq!(queue(&kernels), [(100, 100), (200, 100), (100, 0), (301, 101)]);
    }

    #[test]
    fn work_that_waits_delays_its_channel() {
        let mut timeline = Timeline::default();
        let (engine, length) = kernel(10, 100);
        let mut end =
            |channel, stream_end| timeline.queue(engine, channel, stream_end, length).end - BEGIN;
        assert_eq!(end(0, BEGIN + 500), 600, "waits for its stream");
        assert_eq!(end(0, BEGIN), 600, "behind it in the channel");
        assert_eq!(end(1, BEGIN), 100, "in another channel");
        assert_eq!(end(CHANNELS, BEGIN), 600, "streams share channels");
    }

    #[test]
    fn blocks_fill_a_part_of_the_multiprocessors() {
        let percent = |blocks| Fill::of(blocks, 1_000);
        assert_eq!([percent(1), percent(250), percent(4_000)], [Fill(1), Fill(25), Fill::ALL]);
        assert_eq!(Fill::of(u64::MAX, 1), Fill::ALL);
    }
}
