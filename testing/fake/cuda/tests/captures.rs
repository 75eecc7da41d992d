//! Tests of captures over several streams, and of what graphs keep.

mod driver;

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use driver::{Driver, out};
use tessera_fake_world::shipped;

const MERGE: u32 = 902;
const UNMATCHED: u32 = 903;
const UNJOINED: u32 = 904;
const ISOLATION: u32 = 905;
const CAPTURED_EVENT: u32 = 907;
const RELAXED: usize = 2;

/// Two streams, an event, and a kernel of 1 ms.
struct Streams {
    driver: Driver,
    first: usize,
    second: usize,
    event: usize,
    kernel: usize,
}

impl Streams {
    fn new() -> Self {
        let driver = Driver::begin(shipped::T4_1);
        let kernel = driver.function("spin_for_1ms");
        let [mut first, mut second, mut event] = [0; 3];
        driver.ok("cuStreamCreate", [out(&mut first), 1]);
        driver.ok("cuStreamCreate", [out(&mut second), 1]);
        driver.ok("cuEventCreate", [out(&mut event), 2]);
        Self { driver, first, second, event, kernel }
    }

    fn begin(&self, stream: usize) {
        self.driver.ok("cuStreamBeginCapture_v2", [stream, RELAXED]);
    }

    fn end(&self, stream: usize) -> (u32, usize) {
        let mut graph = 0;
        (self.driver.call("cuStreamEndCapture", [stream, out(&mut graph)]), graph)
    }

    /// Makes `to` wait for the work of `from`; returns the result of the wait.
    fn order(&self, from: usize, to: usize) -> u32 {
        self.driver.ok("cuEventRecord", [self.event, from]);
        self.driver.call("cuStreamWaitEvent", [to, self.event])
    }

    fn launch(&self, stream: usize) {
        self.driver.launch(self.kernel, stream);
    }

    fn nodes(&self, graph: usize) -> Vec<usize> {
        let mut nodes = vec![0; 8];
        let mut count = nodes.len();
        let array = nodes.as_mut_ptr() as usize;
        self.driver.ok("cuGraphGetNodes", [graph, array, out(&mut count)]);
        nodes.truncate(count);
        nodes
    }

    fn dependencies(&self, node: usize) -> usize {
        let mut count = 0;
        self.driver.ok("cuGraphNodeGetDependencies", [node, 0, out(&mut count)]);
        count
    }
}

#[test]
fn events_take_streams_into_a_capture_and_back() {
    let streams = Streams::new();
    let Streams { first, second, .. } = streams;
    streams.begin(first);
    streams.launch(first);
    assert_eq!(streams.order(first, second), 0);
    assert_eq!(streams.driver.call("cuEventQuery", [streams.event]), CAPTURED_EVENT);
    streams.launch(second);
    streams.launch(first);
    assert_eq!(streams.order(second, first), 0);
    streams.launch(first);
    assert_eq!(streams.end(second).0, UNMATCHED);
    let (result, graph) = streams.end(first);
    assert_eq!(result, 0);
    let nodes = streams.nodes(graph);
    let dependencies: Vec<_> = nodes.iter().map(|node| streams.dependencies(*node)).collect();
    assert_eq!(dependencies, [0, 1, 1, 2], "the last kernel runs after both streams");
    let mut roots = 0;
    streams.driver.ok("cuGraphGetRootNodes", [graph, 0, out(&mut roots)]);
    assert_eq!(roots, 1);
    let mut status = 9_u32;
    streams.driver.ok("cuStreamIsCapturing", [second, out(&mut status)]);
    assert_eq!(status, 0, "the capture has ended in both streams");
}

#[test]
fn work_that_is_not_joined_ends_the_capture_with_error() {
    let streams = Streams::new();
    let Streams { first, second, .. } = streams;
    streams.begin(first);
    assert_eq!(streams.order(first, second), 0);
    streams.launch(second);
    assert_eq!(streams.end(first), (UNJOINED, 0));
    streams.begin(first);
    assert_eq!(streams.order(first, second), 0);
    assert_eq!(streams.end(first).0, 0, "a stream without work of its own");
}

#[test]
fn captures_do_not_wait_for_other_work() {
    let streams = Streams::new();
    let Streams { first, second, .. } = streams;
    streams.begin(first);
    assert_eq!(streams.order(second, first), ISOLATION);
    streams.begin(second);
    assert_eq!(streams.order(second, first), MERGE);
    assert_eq!((streams.end(first).0, streams.end(second).0), (0, 0));
    assert_eq!(streams.driver.call("cuStreamWaitEvent", [first, streams.event]), ISOLATION);
}

#[test]
fn capture_continues_at_nodes_that_the_program_sets() {
    const SET: usize = 1;
    let streams = Streams::new();
    let Streams { first, .. } = streams;
    streams.begin(first);
    streams.launch(first);
    let (mut status, mut id, mut graph, mut node) = (0_u32, 0_u64, 0_usize, 0_usize);
    let info = [first, out(&mut status), out(&mut id), out(&mut graph), 0, 0];
    streams.driver.ok("cuStreamGetCaptureInfo_v2", info);
    streams.driver.ok("cuGraphAddEventRecordNode", [out(&mut node), graph, 0, 0, streams.event]);
    let mut nodes = [node];
    let nodes = out(&mut nodes);
    streams.driver.ok("cuStreamUpdateCaptureDependencies", [first, nodes, 1, SET]);
    streams.launch(first);
    assert_eq!(streams.end(first), (0, graph));
    let nodes = streams.nodes(graph);
    let dependencies: Vec<_> = nodes.iter().map(|node| streams.dependencies(*node)).collect();
    assert_eq!((dependencies, nodes[1]), (vec![0, 0, 1], node));
}

static DESTROYED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn destroy(data: *mut c_void) {
    DESTROYED.fetch_add(data as usize, Ordering::Relaxed);
}

#[test]
fn user_objects_live_as_long_as_their_graphs() {
    const NO_DESTRUCTOR_SYNC: usize = 1;
    const MOVE: usize = 1;
    let Streams { driver, .. } = Streams::new();
    let [mut object, mut graph, mut executable] = [0; 3];
    let destructor = destroy as extern "C" fn(_) as usize;
    driver.ok("cuUserObjectCreate", [out(&mut object), 7, destructor, 1, NO_DESTRUCTOR_SYNC]);
    driver.ok("cuGraphCreate", [out(&mut graph), 0]);
    driver.ok("cuGraphRetainUserObject", [graph, object, 1, MOVE]);
    driver.ok("cuGraphInstantiateWithFlags", [out(&mut executable), graph, 0]);
    driver.ok("cuGraphDestroy", [graph]);
    assert_eq!(DESTROYED.load(Ordering::Relaxed), 0, "the executable graph has it");
    driver.ok("cuGraphExecDestroy", [executable]);
    assert_eq!(DESTROYED.load(Ordering::Relaxed), 7);
    assert_ne!(driver.call("cuUserObjectRelease", [object, 1]), 0, "it is gone");
}
