//! A time-sliced GPU.

mod context;

use context::Context;
pub use context::{CHANNELS, Kernel, Spin};

/// Parameters of a GPU.
#[derive(Debug, Clone, Copy)]
pub struct GpuSpec {
    /// Time slice of a context while others have work, in ns. Kernels are preempted at its end and
    /// resume later.
    pub slice: u64,
    /// Cost of a context switch in ns, which is charged to no context.
    pub switch: u64,
    /// Cost of an event in its stream in ns.
    pub event: u64,
}

impl Default for GpuSpec {
    fn default() -> Self {
        Self { slice: 2_000_000, switch: 10_000, event: 700 }
    }
}

/// Resolution of event times: that of `cuEventElapsedTime`.
const EVENT_RESOLUTION: u64 = 500;

/// A GPU and its contexts.
#[derive(Debug)]
pub struct Gpu {
    spec: GpuSpec,
    now: u64,
    contexts: Vec<Context>,
    current: usize,
    slice_end: u64,
    /// End of the current context switch.
    switching: u64,
    /// Total time of context switches.
    switched: u64,
}

impl Gpu {
    /// Returns an idle GPU.
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

    /// Adds a context and returns its number.
    pub fn add_context(&mut self, streams: usize, events: usize) -> usize {
        self.contexts.push(Context::new(streams, events));
        self.contexts.len() - 1
    }

    /// Queues a kernel that the CPU submits at a time.
    pub fn launch(&mut self, context: usize, stream: usize, kernel: Kernel, submitted: u64) {
        self.contexts[context].launch(stream, kernel, submitted);
    }

    /// Queues an event that the CPU submits at a time.
    pub fn record(&mut self, context: usize, stream: usize, event: u16, submitted: u64) {
        self.contexts[context].record(stream, event, self.spec.event, submitted);
    }

    /// Returns the completion time of an event, at the resolution of events.
    #[must_use]
    pub fn completed(&self, context: usize, event: u16) -> Option<u64> {
        let at = self.contexts[context].completed[usize::from(event)]?;
        Some(at / EVENT_RESOLUTION * EVENT_RESOLUTION)
    }

    /// Returns the GPU time of a context.
    #[must_use]
    pub fn ran(&self, context: usize) -> u64 {
        self.contexts[context].ran
    }

    /// Returns the number of kernels that a context has started.
    #[must_use]
    pub fn started_kernels(&self, context: usize) -> u64 {
        self.contexts.get(context).map_or(0, |context| context.started_kernel)
    }

    /// Sets the number of kernels that the peer of a context has started.
    pub fn set_peer(&mut self, context: usize, started: u64) {
        if let Some(context) = self.contexts.get_mut(context) {
            context.peer_started = started;
        }
    }

    /// Returns the total time of context switches.
    #[must_use]
    pub fn switched(&self) -> u64 {
        self.switched
    }

    /// Returns the number of queued operations.
    #[must_use]
    pub fn queued(&self, context: usize) -> usize {
        self.contexts[context].queued
    }

    /// Returns true if a stream has nothing to do.
    #[must_use]
    pub fn is_empty(&self, context: usize, stream: usize) -> bool {
        self.contexts[context].is_empty(stream)
    }

    /// Kills a process and drops its queued work.
    pub fn kill(&mut self, context: usize) {
        self.contexts[context].kill();
    }

    /// Makes [`Gpu::advance`] stop when a context has at most `left` queued operations.
    pub fn wait_for(&mut self, context: usize, left: usize) {
        self.contexts[context].waits_for = Some(left);
    }

    /// Runs until `to`, or until a wait is over; returns the waiting context and the time.
    pub fn advance(&mut self, to: u64) -> Option<(usize, u64)> {
        while self.now < to {
            if self.switching > self.now {
                self.now = self.switching.min(to);
                continue;
            }
            let now = self.now;
            if self.contexts.get(self.current).is_none_or(|context| !context.has_work(now))
                || now >= self.slice_end
            {
                if !self.switch() {
                    let next = self.contexts.iter().filter_map(|context| context.next_work(now));
                    self.now = next.min().unwrap_or(to).min(to);
                }
                continue;
            }
            if let Some(woken) = self.run(to) {
                return Some((woken, self.now));
            }
        }
        None
    }

    /// Switches to the next context with work. Returns false if there is none.
    fn switch(&mut self) -> bool {
        let count = self.contexts.len();
        let next = (1..=count)
            .map(|step| (self.current + step) % count)
            .find(|at| self.contexts[*at].has_work(self.now));
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
        let now = self.now;
        let context = &mut self.contexts[self.current];
        let until = context.next_work(now).unwrap_or(to).min(self.slice_end).min(to);
        self.now += context.run(now, until - now);
        if context.waits_for.is_some_and(|left| context.queued <= left) {
            context.waits_for = None;
            return Some(self.current);
        }
        None
    }
}
