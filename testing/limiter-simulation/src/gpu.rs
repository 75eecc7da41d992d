//! A GPU shared in time.

use std::collections::VecDeque;

/// What a GPU is like.
#[derive(Debug, Clone, Copy)]
pub struct GpuSpec {
    /// How long a context keeps the GPU while others have work, ns. Kernels are cut where it ends,
    /// and go on later.
    pub slice: u64,
    /// What a change of context costs, ns; nobody's time.
    pub switch: u64,
    /// What an event costs in its stream, ns.
    pub event: u64,
}

impl Default for GpuSpec {
    fn default() -> Self {
        Self { slice: 2_000_000, switch: 10_000, event: 500 }
    }
}

/// A GPU and the contexts on it.
#[derive(Debug)]
pub struct Gpu {
    spec: GpuSpec,
    now: u64,
    contexts: Vec<Context>,
    current: usize,
    slice_end: u64,
    /// A change of context is under way until then.
    switching: u64,
    /// Time that changes of context took.
    switched: u64,
}

#[derive(Debug, Clone, Copy)]
struct Op {
    left: u64,
    event: Option<u16>,
}

#[derive(Debug, Default)]
struct Stream {
    queue: VecDeque<Op>,
}

/// One process's work.
#[derive(Debug, Default)]
struct Context {
    streams: Vec<Stream>,
    /// Ops in all queues.
    queued: usize,
    /// When each event was passed.
    passed: Vec<Option<u64>>,
    /// GPU time it had.
    ran: u64,
    /// The process waits until no more than so many ops are left.
    waits_for: Option<usize>,
}

impl Gpu {
    /// An idle one.
    #[must_use]
    pub fn new(spec: GpuSpec) -> Self {
        Self {
            spec,
            now: 0,
            contexts: Vec::new(),
            current: 0,
            slice_end: 0,
            switching: 0,
            switched: 0,
        }
    }

    /// A new context; answers its number.
    pub fn add_context(&mut self, streams: usize, events: usize) -> usize {
        let streams = (0..streams).map(|_| Stream::default()).collect();
        self.contexts.push(Context { streams, passed: vec![None; events], ..Context::default() });
        self.contexts.len() - 1
    }

    /// Queues a kernel.
    pub fn launch(&mut self, context: usize, stream: usize, kernel: u64) {
        self.send(context, stream, Op { left: kernel, event: None });
    }

    /// Queues an event.
    pub fn record(&mut self, context: usize, stream: usize, event: u16) {
        self.contexts[context].passed[usize::from(event)] = None;
        self.send(context, stream, Op { left: self.spec.event, event: Some(event) });
    }

    fn send(&mut self, context: usize, stream: usize, op: Op) {
        let context = &mut self.contexts[context];
        context.streams[stream].queue.push_back(op);
        context.queued += 1;
    }

    /// When an event was passed.
    #[must_use]
    pub fn passed(&self, context: usize, event: u16) -> Option<u64> {
        self.contexts[context].passed[usize::from(event)]
    }

    /// What an event costs.
    #[must_use]
    pub fn event_cost(&self) -> u64 {
        self.spec.event
    }

    /// GPU time a context had.
    #[must_use]
    pub fn ran(&self, context: usize) -> u64 {
        self.contexts[context].ran
    }

    /// Time that changes of context took.
    #[must_use]
    pub fn switched(&self) -> u64 {
        self.switched
    }

    /// Ops not done.
    #[must_use]
    pub fn queued(&self, context: usize) -> usize {
        self.contexts[context].queued
    }

    /// Kills a process: its work is gone.
    pub fn kill(&mut self, context: usize) {
        let context = &mut self.contexts[context];
        for stream in &mut context.streams {
            stream.queue.clear();
        }
        context.queued = 0;
        context.waits_for = None;
    }

    /// Has [`Gpu::advance`] stop once a context has no more than so many ops left.
    pub fn wait_for(&mut self, context: usize, left: usize) {
        self.contexts[context].waits_for = Some(left);
    }

    /// Runs until then, or until something that somebody waits for is done; answers whose and when.
    pub fn advance(&mut self, to: u64) -> Option<(usize, u64)> {
        while self.now < to {
            if self.switching > self.now {
                self.now = self.switching.min(to);
                continue;
            }
            if self.contexts.get(self.current).is_none_or(|context| context.queued == 0)
                || self.now >= self.slice_end
            {
                if !self.switch() {
                    self.now = to;
                }
                continue;
            }
            if let Some(woken) = self.run(to) {
                return Some((woken, self.now));
            }
        }
        None
    }

    /// Turns to the next context with work.
    fn switch(&mut self) -> bool {
        let count = self.contexts.len();
        let next = (1..=count)
            .map(|step| (self.current + step) % count)
            .find(|at| self.contexts[*at].queued > 0);
        let Some(next) = next else { return false };
        if next != self.current {
            self.switching = self.now + self.spec.switch;
            self.switched += self.spec.switch;
        }
        self.current = next;
        self.slice_end = self.switching.max(self.now) + self.spec.slice;
        true
    }

    fn run(&mut self, to: u64) -> Option<usize> {
        let context = &mut self.contexts[self.current];
        let heads = context.streams.iter().filter_map(|stream| stream.queue.front());
        let shortest = heads.map(|op| op.left).min()?;
        let step = shortest.min(self.slice_end - self.now).min(to - self.now);
        self.now += step;
        context.ran += step;
        for stream in &mut context.streams {
            let Some(op) = stream.queue.front_mut() else { continue };
            op.left -= step;
            if op.left > 0 {
                continue;
            }
            if let Some(event) = op.event {
                context.passed[usize::from(event)] = Some(self.now);
            }
            stream.queue.pop_front();
            context.queued -= 1;
        }
        if context.waits_for.is_some_and(|left| context.queued <= left) {
            context.waits_for = None;
            return Some(self.current);
        }
        None
    }
}
