//! Windows: what launches of several streams used, by the time from one end of them to the next.

use super::Meter;
use super::learning::Settled;
use crate::compute::Contention;
use crate::compute::decision::ComputeView;
use crate::compute::proportion::in_proportion;
use crate::compute::sample::Window;
use crate::compute::spans::Span;

/// GPU time of the launches in a window, ns.
#[derive(Debug, Clone, Copy)]
enum Used {
    /// By the window itself.
    Measured(u64),
    /// By other windows.
    Usual(u64),
}

/// Interruption of the launches within a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interruption {
    /// Nothing.
    None,
    /// Turns of other contexts without a turn of the process between them, or an idle time.
    One,
    /// Any number of turns: the window is about as long as a turn.
    Many,
}

impl Meter {
    /// Charges the launches that a span stands for: what they used in the window that it ends.
    pub(super) fn settle_window(
        &mut self,
        (span, window): (Span, Window),
        settled: Settled,
        contention: Contention,
        view: &ComputeView<'_>,
        now: u64,
    ) {
        let used = self.used_in((&span, window), settled, contention, view.slice_ns.max(1));
        let (used, spun) = match used {
            Used::Measured(used) => (used, settled.excess_ns()),
            // The sample contains turns of others, and says nothing of the window.
            Used::Usual(used) => (used, 0),
        };
        self.overlap.learn(span.stands_for, used);
        let charged = span.part.of(span.stands_for);
        // The time for which a kernel spins is charged over seconds.
        let excess = spun.min(used.saturating_sub(charged.saturating_mul(2)));
        self.correct(charged, used - excess, used - excess, view, now);
        self.add_excess((excess, excess), view, now);
    }

    /// Returns the GPU time of the launches that a span stands for.
    fn used_in(
        &mut self,
        (span, window): (&Span, Window),
        settled: Settled,
        contention: Contention,
        slice_ns: u64,
    ) -> Used {
        let Window { elapsed_ns, is_busy } = window;
        let expected = if is_busy {
            self.overlap.part().of(span.stands_for)
        } else {
            self.separate_ns(span, settled)
        };
        if is_busy && !contention.is_negligible() {
            self.overlap.interruptions.learn(elapsed_ns, slice_ns);
        }
        let interruptions = &self.overlap.interruptions;
        let mut most = expected.saturating_add(expected / 2);
        // A launch that waits for SMs takes longer than the ends of launches are apart.
        if !is_busy || !interruptions.are_of_windows_below(slice_ns / 2) {
            most = most.max(settled.own_ns(span.cost));
        }
        match interruption(window, most, contention.is_negligible(), slice_ns) {
            // Launches that take longer than the window overlap, unless the program has waited in
            // it: then the process may have been idle for a part of it.
            Interruption::None if is_busy || span.waits == 0 && elapsed_ns < span.stands_for => {
                // Launches at the pace of the CPU were delayed by the measurement.
                let delay = if is_busy { 0 } else { span.measuring_ns() };
                self.overlap.learn_within(span.stands_for, elapsed_ns.saturating_sub(delay));
                Used::Measured(elapsed_ns)
            }
            Interruption::One if is_busy => {
                Used::Usual(self.overlap.interruptions.mean_ns().unwrap_or(expected))
            }
            Interruption::Many if is_busy => Used::Measured(contention.share_of(elapsed_ns)),
            _ => Used::Measured(expected.min(elapsed_ns)),
        }
    }

    /// Returns the GPU time of a span's launches if the process had no work between some of them.
    /// The first launch after each wait runs alone.
    fn separate_ns(&self, span: &Span, settled: Settled) -> u64 {
        let own = settled.own_ns(span.cost);
        // The sample stands for the other launches, too.
        let of_own = |ns: u64| match settled {
            Settled::Sample { is_of_all: true, .. } => in_proportion(ns, own, span.cost.max(1)),
            _ => ns,
        };
        let rest = of_own(span.stands_for - span.cost);
        let waits = span.waits - u64::from(span.is_after_wait).min(span.waits);
        let first = waits.saturating_mul(of_own(span.cost)).min(rest);
        let runs_alone = span.is_after_wait || span.waits == 0;
        let (alone, beside) = if runs_alone { (own, 0) } else { (0, own) };
        let within = self.overlap.part_within();
        alone.saturating_add(first).saturating_add(within.of((rest - first).saturating_add(beside)))
    }
}

/// Returns what interrupts launches that run for at most `most_ns`.
const fn interruption(window: Window, most_ns: u64, is_alone: bool, slice_ns: u64) -> Interruption {
    if is_alone && window.is_busy {
        Interruption::None
    } else if !is_alone && most_ns >= slice_ns / 8 * 5 {
        Interruption::Many
    } else if window.elapsed_ns > most_ns.saturating_add(slice_ns / 8 * 3) {
        Interruption::One
    } else {
        Interruption::None
    }
}
