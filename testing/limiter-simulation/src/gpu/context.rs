//! The work of one process: streams, the hardware channels that they share, and the SMs.

use std::collections::VecDeque;

/// Number of hardware channels of a context: the default of `CUDA_DEVICE_MAX_CONNECTIONS`.
pub const CHANNELS: usize = 8;

/// A kernel.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    /// Run time in ns.
    pub ns: u64,
    /// Part of the SMs that its blocks fill, in percent of the GPU.
    pub fill_percent: u32,
    /// Time before the end of the kernel ahead of it at which it starts, in ns: programmatic
    /// dependent launch. 0: after its end.
    pub overlap: u64,
    /// Event before which it does not end, as a kernel of NCCL waits for its peer.
    pub spins: Spin,
}

/// Event before which a kernel does not end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spin {
    /// None.
    No,
    /// The next kernel of its context has started.
    NextKernel,
    /// The peer of its context has started as many kernels.
    Peer,
}

impl Kernel {
    /// Returns a kernel that fills the GPU.
    #[must_use]
    pub const fn new(ns: u64) -> Self {
        Self { ns, fill_percent: 100, overlap: 0, spins: Spin::No }
    }
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    /// A kernel and its number within the context.
    Kernel(Kernel, u64),
    Event(u16),
}

#[derive(Debug, Clone, Copy)]
struct Op {
    kind: Kind,
    left: u64,
    /// The time at which the CPU submits it.
    submitted: u64,
    /// Its place among all operations of the context.
    place: u64,
}

impl Op {
    fn fill(&self) -> u32 {
        match self.kind {
            Kind::Kernel(kernel, _) => kernel.fill_percent,
            Kind::Event(_) => 0,
        }
    }

    /// Returns true if it may start while this operation, which is ahead of it, runs.
    fn overlaps(&self, ahead: &Self) -> bool {
        let Kind::Kernel(kernel, _) = self.kind else { return false };
        kernel.overlap > 0 && matches!(ahead.kind, Kind::Kernel(..)) && ahead.left <= kernel.overlap
    }
}

#[derive(Debug, Default)]
struct Stream {
    queue: VecDeque<Op>,
    /// Number of its first operations that run.
    running: usize,
}

impl Stream {
    /// Returns the first operation that has not started and that the CPU has submitted.
    fn waiting(&self, now: u64) -> Option<&Op> {
        self.queue.get(self.running).filter(|op| op.submitted <= now)
    }

    /// Returns true if the order of the stream lets its first waiting operation start.
    fn is_ready(&self) -> bool {
        match (self.running, self.queue.front(), self.queue.get(1)) {
            (0, ..) => true,
            (1, Some(ahead), Some(op)) => op.overlaps(ahead),
            _ => false,
        }
    }

    fn first_running(&self) -> Option<&Op> {
        self.running().next()
    }

    fn running(&self) -> impl Iterator<Item = &Op> {
        self.queue.iter().take(self.running)
    }
}

/// Work of one process.
///
/// The operations of a stream run one after the other. Streams share [`CHANNELS`] channels, which
/// start operations in the order of their submission: an operation that waits for the one ahead in
/// its stream blocks all later ones in its channel. Kernels get SMs in the order of their
/// submission, and only at once as far as the SMs suffice.
#[derive(Debug, Default)]
pub(super) struct Context {
    streams: Vec<Stream>,
    places: u64,
    kernels: u64,
    /// Number of the last kernel that has started.
    pub(super) started_kernel: u64,
    /// Number of kernels that its peer has started.
    pub(super) peer_started: u64,
    /// Operations in all queues.
    pub(super) queued: usize,
    /// Completion time of each event.
    pub(super) completed: Vec<Option<u64>>,
    /// GPU time of the context: the time during which an operation runs.
    pub(super) ran: u64,
    /// Queue length for which the process waits.
    pub(super) waits_for: Option<usize>,
}

impl Context {
    pub(super) fn new(streams: usize, events: usize) -> Self {
        Self {
            streams: (0..streams).map(|_| Stream::default()).collect(),
            completed: vec![None; events],
            ..Self::default()
        }
    }

    pub(super) fn launch(&mut self, stream: usize, kernel: Kernel, submitted: u64) {
        self.kernels += 1;
        self.push(stream, Kind::Kernel(kernel, self.kernels), kernel.ns, submitted);
    }

    pub(super) fn record(&mut self, stream: usize, event: u16, ns: u64, submitted: u64) {
        self.completed[usize::from(event)] = None;
        self.push(stream, Kind::Event(event), ns, submitted);
    }

    fn push(&mut self, stream: usize, kind: Kind, left: u64, submitted: u64) {
        self.places += 1;
        self.streams[stream].queue.push_back(Op { kind, left, submitted, place: self.places });
        self.queued += 1;
    }

    /// Drops all queued work.
    pub(super) fn kill(&mut self) {
        for stream in &mut self.streams {
            *stream = Stream::default();
        }
        self.queued = 0;
        self.waits_for = None;
    }

    /// Returns true if a stream has nothing to do.
    pub(super) fn is_empty(&self, stream: usize) -> bool {
        self.streams[stream].queue.is_empty()
    }

    /// Returns true if an operation runs or can start.
    pub(super) fn has_work(&self, now: u64) -> bool {
        self.streams.iter().any(|stream| stream.running > 0 || stream.waiting(now).is_some())
    }

    /// Returns the time after `now` at which the CPU submits the next operation of a stream.
    pub(super) fn next_work(&self, now: u64) -> Option<u64> {
        let next = |stream: &Stream| stream.queue.get(stream.running).map(|op| op.submitted);
        self.streams.iter().filter_map(next).filter(|submitted| *submitted > now).min()
    }

    /// Runs for at most `most` ns from `now` and returns the time until a change.
    pub(super) fn run(&mut self, now: u64, most: u64) -> u64 {
        while let Some(stream) = self.next_start(now) {
            self.start(stream);
        }
        let step = self.next_change().map_or(most, |change| change.min(most));
        self.ran += step;
        for stream in 0..self.streams.len() {
            self.advance(stream, now, step);
        }
        step
    }

    /// Returns the stream whose first waiting operation starts next.
    fn next_start(&self, now: u64) -> Option<usize> {
        let filled: u32 = self.streams.iter().flat_map(Stream::running).map(Op::fill).sum();
        let waiting = |stream: &Stream| stream.waiting(now).map(|op| op.place);
        let is_first = |at: usize, place: u64| {
            let channel = self.streams.iter().skip(at % CHANNELS).step_by(CHANNELS);
            channel.filter_map(waiting).all(|other| other >= place)
        };
        let ready = self.streams.iter().enumerate().filter_map(|(at, stream)| {
            let op = stream.waiting(now)?;
            (stream.is_ready() && is_first(at, op.place)).then_some((op, stream.running, at))
        });
        let (events, kernels): (Vec<_>, Vec<_>) = ready.partition(|(op, ..)| op.fill() == 0);
        if let Some((_, _, at)) = events.first() {
            return Some(*at);
        }
        // Blocks of a dependent kernel start while those of the kernel ahead drain.
        let (op, running, at) = kernels.into_iter().min_by_key(|(op, ..)| op.place)?;
        (running > 0 || filled == 0 || filled + op.fill() <= 100).then_some(at)
    }

    fn start(&mut self, at: usize) {
        let stream = &mut self.streams[at];
        if let Some(Op { kind: Kind::Kernel(_, number), .. }) = stream.queue.get(stream.running) {
            self.started_kernel = self.started_kernel.max(*number);
        }
        stream.running += 1;
    }

    fn waits_for_peer(&self, op: &Op) -> bool {
        let Kind::Kernel(kernel, number) = op.kind else { return false };
        match kernel.spins {
            Spin::No => false,
            Spin::NextKernel => self.started_kernel <= number,
            Spin::Peer => self.peer_started < number,
        }
    }

    /// Returns the time until an operation ends, or until a dependent kernel can start.
    fn next_change(&self) -> Option<u64> {
        let first = self.streams.iter().filter_map(Stream::first_running);
        let ends = first.filter(|op| !self.waits_for_peer(op)).map(|op| op.left);
        let dependent = self.streams.iter().filter_map(|stream| {
            let (ahead, op) = (stream.queue.front()?, stream.queue.get(1)?);
            let Kind::Kernel(kernel, _) = op.kind else { return None };
            (stream.running == 1 && ahead.left > kernel.overlap)
                .then(|| ahead.left - kernel.overlap)
        });
        ends.chain(dependent).min()
    }

    fn advance(&mut self, at: usize, now: u64, step: u64) {
        let running = self.streams[at].running;
        for op in self.streams[at].queue.iter_mut().take(running) {
            op.left = op.left.saturating_sub(step);
        }
        while let Some(op) = self.streams[at].first_running().copied() {
            if op.left > 0 || self.waits_for_peer(&op) {
                return;
            }
            if let Kind::Event(event) = op.kind {
                self.completed[usize::from(event)] = Some(now + step);
            }
            let stream = &mut self.streams[at];
            stream.queue.pop_front();
            stream.running -= 1;
            self.queued -= 1;
        }
    }
}
