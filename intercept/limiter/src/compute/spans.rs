//! Launches that are measured, in the order in which they were made.

use crate::compute::{Launch, Marker};

/// Spans that there is room for.
const ROOM: usize = 64;

/// The event that is recorded before a pair to see how much time an empty pair takes.
pub const CALIBRATION: Marker = Marker(ROOM as u16 * 2);

/// Who has been under way for so long does not hold up those behind it, which may be in other
/// streams: it may never end.
const LONG_UNDER_WAY_NS: u64 = 100_000_000;

/// When a measured launch and its events were submitted: monotonic ns, after each call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Submission {
    /// The event before it was recorded.
    pub before: u64,
    /// It was launched.
    pub launched: u64,
    /// The event behind it was recorded.
    pub behind: u64,
    /// Before all that, its stream had nothing to do.
    pub was_idle: bool,
    /// After all that, the GPU had not come to the event before it yet.
    pub was_queued: bool,
}

/// One measured launch, between two events.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    /// Its number, in the order in which they were made, from 1; given by [`Spans::push`].
    pub(super) serial: u64,
    /// What was launched, and where.
    pub(super) launch: Launch,
    /// What was prepaid for this launch.
    pub(super) cost: u64,
    /// What was prepaid for it and for the launches since the last span that may be under way.
    pub(super) charged: u64,
    /// The same with those that are done.
    pub(super) stands_for: u64,
    /// When it was let go.
    pub(super) begun: u64,
    /// `turn_ns` of the page at that time.
    pub(super) turn: u64,
    /// GPU-ns that the process was charged for completed work before it was launched.
    pub(super) completed: u64,
    /// It also shows how much time an empty pair of events takes.
    pub(super) calibrates: bool,
    /// When it was submitted; `None` while it is being submitted.
    pub(super) submission: Option<Submission>,
    /// The GPU is done with it.
    pub(super) done: bool,
    /// The launch failed, or its context is gone: nothing can be measured.
    pub(super) void: bool,
}

/// Some streams.
#[derive(Debug)]
pub struct Streams {
    streams: [usize; ROOM],
    count: usize,
}

impl Streams {
    /// No stream.
    #[must_use]
    pub const fn none() -> Self {
        Self { streams: [0; ROOM], count: 0 }
    }

    /// Whether it is one of them.
    #[must_use]
    pub fn contains(&self, stream: usize) -> bool {
        self.streams.iter().take(self.count).any(|other| *other == stream)
    }

    /// Adds one, of as many as there are measured launches.
    pub fn add(&mut self, stream: usize) {
        if !self.contains(stream)
            && let Some(place) = self.streams.get_mut(self.count)
        {
            *place = stream;
            self.count += 1;
        }
    }
}

/// All that are not settled. The markers of a span are its place's own, and free for use again once
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

    /// Half of them are kept for launches that take long, and one for the last that ended.
    pub(super) fn has_room(&self, for_long: bool) -> bool {
        self.in_any_order().count() < if for_long { ROOM - 2 } else { ROOM / 2 }
    }

    /// How many were added so far.
    pub(super) const fn pushed(&self) -> u64 {
        self.serial
    }

    /// Adds one and answers its place, which is not `kept`, and its number. Places are used again
    /// as late as can be: who was given one may come back to it after its span is gone.
    pub(super) fn push(&mut self, span: Span, kept: Option<usize>) -> Option<(usize, u64)> {
        let from = self.serial as usize;
        let place = (from..from + ROOM)
            .map(|at| at % ROOM)
            .find(|place| self.places[*place].is_none() && Some(*place) != kept)?;
        self.serial += 1;
        self.places[place] = Some(Span { serial: self.serial, ..span });
        Some((place, self.serial))
    }

    /// Takes away the oldest that the GPU is done with. It waits for those before it in its stream,
    /// unless they take very long.
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

    /// All of them.
    pub(super) fn pending(&mut self) -> impl Iterator<Item = (usize, &mut Span)> {
        self.places.iter_mut().enumerate().filter_map(|(place, span)| Some((place, span.as_mut()?)))
    }

    /// All of them, oldest first, with their places.
    pub(super) fn places(&self) -> impl Iterator<Item = (usize, &Span)> {
        let mut last = 0;
        core::iter::from_fn(move || {
            let newer = self.in_any_order().filter(|(_, span)| span.serial > last);
            let next = newer.min_by_key(|(_, span)| span.serial)?;
            last = next.1.serial;
            Some(next)
        })
    }

    /// Those that are not known to be done.
    pub(super) fn under_way(&self) -> impl Iterator<Item = &Span> {
        self.in_any_order().map(|(_, span)| span).filter(|span| !span.done)
    }

    /// GPU-ns of a stream's launches behind the oldest that is not known to be done; `None` without
    /// such a launch.
    pub(super) fn queued_in(&self, stream: usize) -> Option<u64> {
        let in_stream = || self.under_way().filter(|span| span.launch.stream == stream);
        let oldest = in_stream().min_by_key(|span| span.serial)?;
        Some(in_stream().map(|span| span.charged).sum::<u64>() - oldest.charged)
    }

    /// The span of that number, unless the GPU is known to be done with it.
    pub(super) fn under_way_as(&mut self, serial: u64) -> Option<&mut Span> {
        self.places.iter_mut().flatten().find(|span| span.serial == serial && !span.done)
    }

    fn in_any_order(&self) -> impl Iterator<Item = (usize, &Span)> {
        self.places.iter().enumerate().filter_map(|(place, span)| Some((place, span.as_ref()?)))
    }

    /// The event before the launch.
    pub(super) const fn before(place: usize) -> Marker {
        Marker(place as u16 * 2)
    }

    /// The event behind it.
    pub(super) const fn behind(place: usize) -> Marker {
        Marker(place as u16 * 2 + 1)
    }
}
