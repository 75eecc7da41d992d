//! Measured launches in the order of submission.

use crate::compute::part::Part;
use crate::compute::{Launch, Marker};

/// Most spans at a time.
const ROOM: usize = 64;

/// Event that is recorded before a pair to measure the time of an empty pair.
pub const CALIBRATION: Marker = Marker(ROOM as u16 * 2);

/// Age from which a span does not hold up later ones: it may never end.
const LONG_UNDER_WAY_NS: u64 = 100_000_000;

/// Submission times of a measured launch and its events: monotonic ns, after each call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Submission {
    /// Event before it.
    pub before: u64,
    /// The launch.
    pub launched: u64,
    /// Event behind it.
    pub behind: u64,
    /// True if its stream was idle before.
    pub was_idle: bool,
    /// True if the GPU had not reached the event before it afterwards.
    pub was_queued: bool,
}

/// One measured launch, between two events.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    /// Number in the order of submission, from 1; set by [`Spans::push`].
    pub(super) serial: u64,
    /// The launch.
    pub(super) launch: Launch,
    /// GPU-ns charged in advance for this launch.
    pub(super) cost: u64,
    /// GPU-ns charged in advance for it and for launches since the last span that may be under
    /// way.
    pub(super) charged: u64,
    /// `charged`, and the GPU-ns charged for launches since the last span that are done.
    pub(super) stands_for: u64,
    /// Part of `stands_for` that was charged.
    pub(super) part: Part,
    /// Times that the program has waited for work since the span before.
    pub(super) waits: u64,
    /// True if it is the first launch after a wait.
    pub(super) is_after_wait: bool,
    /// Number of the busy period: while it lasts, some measured launch is always under way.
    pub(super) period: u64,
    /// Time of its admission.
    pub(super) begun: u64,
    /// `turn_ns` of the page at that time.
    pub(super) turn: u64,
    /// GPU-ns that the process was charged for completed work before it was launched.
    pub(super) completed: u64,
    /// True if it also measures an empty pair of events.
    pub(super) calibrates: bool,
    /// Its submission; `None` while it is being submitted.
    pub(super) submission: Option<Submission>,
    /// True if the GPU is done with it.
    pub(super) done: bool,
    /// True if the launch failed or its context was destroyed: nothing can be measured.
    pub(super) void: bool,
}

impl Span {
    /// Returns true if the GPU had not reached the event before it when it was submitted.
    pub(super) fn was_queued(&self) -> bool {
        self.submission.is_some_and(|submission| submission.was_queued)
    }

    /// Returns the CPU time that its measurement took.
    pub(super) fn measuring_ns(&self) -> u64 {
        self.submission.map_or(0, |submission| {
            let before = submission.before.saturating_sub(self.begun);
            before + submission.behind.saturating_sub(submission.launched)
        })
    }
}

/// Set of streams.
#[derive(Debug)]
pub struct Streams {
    streams: [usize; ROOM],
    count: usize,
}

impl Streams {
    /// Creates an empty set.
    #[must_use]
    pub const fn none() -> Self {
        Self { streams: [0; ROOM], count: 0 }
    }

    /// Returns true if it contains the stream.
    #[must_use]
    pub fn contains(&self, stream: usize) -> bool {
        self.streams.iter().take(self.count).any(|other| *other == stream)
    }

    /// Adds a stream. There is room for one of each measured launch.
    pub fn add(&mut self, stream: usize) {
        if !self.contains(stream)
            && let Some(place) = self.streams.get_mut(self.count)
        {
            *place = stream;
            self.count += 1;
        }
    }
}

/// Spans that are not settled. The markers of a span belong to its place. They are free again when
/// it is no longer the last one that ended.
#[derive(Debug)]
pub(super) struct Spans {
    places: [Option<Span>; ROOM],
    serial: u64,
}

impl Spans {
    pub(super) const MARKERS: usize = ROOM * 2 + 1;

    pub(super) const fn new() -> Self {
        Self { places: [None; ROOM], serial: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.places.iter().all(Option::is_none)
    }

    /// Returns true if there is room. Half of the places are reserved for long launches, and one
    /// for the last that ended.
    pub(super) fn has_room(&self, for_long: bool) -> bool {
        self.in_any_order().count() < if for_long { ROOM - 2 } else { ROOM / 2 }
    }

    /// Returns the number of spans that were added so far.
    pub(super) const fn pushed(&self) -> u64 {
        self.serial
    }

    /// Adds a span and returns its place, which is not `kept`, and its number. Places are reused as
    /// late as possible: a thread may come back to its place after the span was settled.
    pub(super) fn push(&mut self, span: Span, kept: Option<usize>) -> Option<(usize, u64)> {
        let from = self.serial as usize;
        let place = (from..from + ROOM)
            .map(|at| at % ROOM)
            .find(|place| self.places[*place].is_none() && Some(*place) != kept)?;
        self.serial += 1;
        self.places[place] = Some(Span { serial: self.serial, ..span });
        Some((place, self.serial))
    }

    /// Removes and returns the oldest span that the GPU is done with. It waits for earlier spans of
    /// its stream, unless they take very long.
    pub(super) fn pop_done(&mut self, now: u64) -> Option<(usize, Span)> {
        let holds_up = |span: &Span| now.saturating_sub(span.begun) < LONG_UNDER_WAY_NS;
        let mut held_up = Streams::none();
        let (place, span) = self.places().find_map(|(place, span)| {
            if span.done && !held_up.contains(span.launch.stream) {
                return Some((place, *span));
            }
            if holds_up(span) {
                held_up.add(span.launch.stream);
            }
            None
        })?;
        self.places[place] = None;
        Some((place, span))
    }

    /// Returns all spans.
    pub(super) fn pending(&mut self) -> impl Iterator<Item = (usize, &mut Span)> {
        self.places.iter_mut().enumerate().filter_map(|(place, span)| Some((place, span.as_mut()?)))
    }

    /// Returns all spans, oldest first, with their places.
    pub(super) fn places(&self) -> impl Iterator<Item = (usize, &Span)> {
        let mut last = 0;
        core::iter::from_fn(move || {
            let newer = self.in_any_order().filter(|(_, span)| span.serial > last);
            let next = newer.min_by_key(|(_, span)| span.serial)?;
            last = next.1.serial;
            Some(next)
        })
    }

    /// Returns the spans that are not known to be done.
    pub(super) fn under_way(&self) -> impl Iterator<Item = &Span> {
        self.in_any_order().map(|(_, span)| span).filter(|span| !span.done)
    }

    /// Returns the GPU-ns of a stream's launches behind the oldest that is not known to be done;
    /// `None` without such a launch.
    pub(super) fn queued_in(&self, stream: usize) -> Option<u64> {
        let in_stream = || self.under_way().filter(|span| span.launch.stream == stream);
        let oldest = in_stream().min_by_key(|span| span.serial)?;
        Some(in_stream().map(|span| span.charged).sum::<u64>() - oldest.charged)
    }

    /// Returns the span of a number, unless the GPU is known to be done with it.
    pub(super) fn under_way_as(&mut self, serial: u64) -> Option<&mut Span> {
        self.places.iter_mut().flatten().find(|span| span.serial == serial && !span.done)
    }

    fn in_any_order(&self) -> impl Iterator<Item = (usize, &Span)> {
        self.places.iter().enumerate().filter_map(|(place, span)| Some((place, span.as_ref()?)))
    }

    /// Returns the event before the launch of a place.
    pub(super) const fn before(place: usize) -> Marker {
        Marker(place as u16 * 2)
    }

    /// Returns the event behind the launch of a place.
    pub(super) const fn behind(place: usize) -> Marker {
        Marker(place as u16 * 2 + 1)
    }
}
