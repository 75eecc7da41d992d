//! Launches that are measured, in the order in which they were made.

use crate::compute::{Key, Marker};

/// Spans that there is room for; a power of two.
const ROOM: usize = 64;

/// One measured launch, between two events.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    /// What was launched.
    pub(super) key: Key,
    /// Its context: events of two contexts cannot be compared.
    pub(super) context: usize,
    /// What was prepaid for this launch.
    pub(super) cost: u64,
    /// What was prepaid for it and for the launches since the last span.
    pub(super) charged: u64,
    /// When it was let go.
    pub(super) begun: u64,
    /// `turn_ns` of the page at that time.
    pub(super) turn: u64,
    /// The GPU is done with it.
    pub(super) done: bool,
    /// The launch failed, or its context is gone: nothing can be measured.
    pub(super) void: bool,
}

/// A ring of them. The markers of a span are its place's own, and free for use again once it is no longer the last one that ended.
#[derive(Debug)]
pub(super) struct Spans {
    ring: [Option<Span>; ROOM],
    head: usize,
    count: usize,
}

impl Spans {
    pub(super) const MARKERS: usize = ROOM * 2;

    pub(super) const fn new() -> Self {
        Self { ring: [None; ROOM], head: 0, count: 0 }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Half of them are kept for launches that take long.
    pub(super) const fn has_room(&self, for_long: bool) -> bool {
        self.count < if for_long { ROOM - 2 } else { ROOM / 2 }
    }

    /// Adds one and answers its place.
    pub(super) const fn push(&mut self, span: Span) -> usize {
        let place = (self.head + self.count) % ROOM;
        self.ring[place] = Some(span);
        self.count += 1;
        place
    }

    /// Takes the oldest away, if the GPU is done with it.
    pub(super) fn pop_done(&mut self) -> Option<(usize, Span)> {
        let place = self.head;
        let span = self.ring[place].filter(|span| self.count > 0 && span.done)?;
        self.head = (self.head + 1) % ROOM;
        self.count -= 1;
        Some((place, span))
    }

    /// All that are under way, with their places.
    pub(super) fn pending(&mut self) -> impl Iterator<Item = (usize, &mut Span)> {
        let (head, count) = (self.head, self.count);
        let (wrapped, first) = self.ring.split_at_mut(head);
        let first = first.iter_mut().enumerate().map(move |(at, span)| (at + head, span));
        let all = first.chain(wrapped.iter_mut().enumerate()).take(count);
        all.filter_map(|(place, span)| Some((place, span.as_mut()?)))
    }

    /// All of them, oldest first, with their places.
    pub(super) fn places(&self) -> impl Iterator<Item = (usize, &Span)> {
        let places = (self.head..self.head + self.count).map(|at| at % ROOM);
        places.filter_map(|place| Some((place, self.ring[place].as_ref()?)))
    }

    /// Those that are not known to be done.
    pub(super) fn under_way(&self) -> impl Iterator<Item = &Span> {
        self.places().map(|(_, span)| span).filter(|span| !span.done)
    }

    pub(super) fn at(&mut self, place: usize) -> Option<&mut Span> {
        self.ring.get_mut(place)?.as_mut()
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
