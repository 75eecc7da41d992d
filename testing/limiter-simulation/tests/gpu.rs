//! The simulated GPU runs kernels as hardware does.

use tessera_intercept_simulation::{CHANNELS, Gpu, GpuSpec, Kernel, MS, Spin, US};

const SPEC: GpuSpec = GpuSpec { slice: 2 * MS, switch: 10 * US, event: 0 };

/// Returns a GPU with a context of this many streams, each with an event.
fn gpu(streams: usize) -> Gpu {
    let mut gpu = Gpu::new(SPEC);
    gpu.add_context(streams, streams);
    gpu
}

fn kernel(ns: u64, fill_percent: u32) -> Kernel {
    Kernel { fill_percent, ..Kernel::new(ns) }
}

/// Returns the times at which the events of the streams complete.
fn ends(mut gpu: Gpu, streams: usize) -> Vec<u64> {
    for stream in 0..streams {
        gpu.record(0, stream, stream as u16, 0);
    }
    gpu.advance(100 * MS);
    (0..streams).map(|at| gpu.completed(0, at as u16).expect("completed")).collect()
}

#[test]
fn kernels_run_at_once_as_far_as_the_sms_suffice() {
    let mut gpu = gpu(4);
    for stream in 0..4 {
        gpu.launch(0, stream, kernel(100 * US, 40), 0);
    }
    assert_eq!(ends(gpu, 4), [100 * US, 100 * US, 200 * US, 200 * US]);
}

#[test]
fn kernels_that_fill_the_gpu_run_one_by_one() {
    let mut gpu = gpu(3);
    for stream in 0..3 {
        gpu.launch(0, stream, Kernel::new(100 * US), 0);
    }
    assert_eq!(ends(gpu, 3), [100 * US, 200 * US, 300 * US]);
}

#[test]
fn streams_of_one_channel_wait_for_each_other() {
    let mut gpu = gpu(CHANNELS + 1);
    gpu.launch(0, 0, kernel(100 * US, 10), 0);
    gpu.launch(0, 0, kernel(100 * US, 10), 0);
    gpu.launch(0, 1, kernel(100 * US, 10), 0);
    gpu.launch(0, CHANNELS, kernel(100 * US, 10), 0);
    let ends = ends(gpu, CHANNELS + 1);
    assert_eq!(ends[1], 100 * US);
    assert_eq!(ends[CHANNELS], 200 * US, "behind the second kernel of stream 0");
}

#[test]
fn dependent_kernels_start_before_the_end_of_the_previous() {
    let mut gpu = gpu(1);
    for _ in 0..3 {
        gpu.launch(0, 0, Kernel { overlap: 30 * US, ..Kernel::new(100 * US) }, 0);
    }
    assert_eq!(ends(gpu, 1), [240 * US]);
}

#[test]
fn an_event_between_dependent_kernels_separates_them() {
    let mut gpu = Gpu::new(SPEC);
    gpu.add_context(1, 2);
    let dependent = Kernel { overlap: 30 * US, ..Kernel::new(100 * US) };
    gpu.launch(0, 0, dependent, 0);
    gpu.record(0, 0, 1, 0);
    gpu.launch(0, 0, dependent, 0);
    assert_eq!(ends(gpu, 1), [200 * US]);
}

#[test]
fn a_spinning_kernel_ends_when_its_peer_has_started() {
    let mut gpu = gpu(2);
    gpu.launch(0, 0, Kernel { spins: Spin::NextKernel, ..kernel(100 * US, 10) }, 0);
    gpu.launch(0, 1, kernel(50 * US, 10), 400 * US);
    assert_eq!(ends(gpu, 2), [400 * US, 450 * US]);
}

#[test]
fn a_preempted_kernel_resumes_in_its_next_slice() {
    let mut gpu = gpu(1);
    gpu.add_context(1, 0);
    gpu.launch(0, 0, Kernel::new(3 * MS), 0);
    gpu.launch(1, 0, Kernel::new(5 * MS), 0);
    let end = ends(gpu, 1)[0];
    // Beside two slices of the other context, which comes first.
    assert!((7 * MS..=7 * MS + 4 * SPEC.switch).contains(&end), "{end}");
}
