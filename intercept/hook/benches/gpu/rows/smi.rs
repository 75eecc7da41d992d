//! `nvidia-smi`, as a sampler beside a container and as a program in one.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};

use super::{Harness, MIB, judged, mib};
use crate::container::{Mode, NodeShare};

const LINES: &str = "--format=csv,noheader,nounits";

/// Runs something while the program samples the GPU every 100 ms, from its first line on; what it
/// printed.
pub(super) fn sampled<T>(
    program: &Path,
    harness: &Harness<'_>,
    run: impl FnOnce() -> T,
) -> (T, String) {
    let mut command = Command::new(program);
    command.args(["--query-gpu=timestamp,utilization.gpu", LINES, "--loop-ms=100"]);
    command.arg(format!("--id={}", harness.gpu.uuid)).stdout(Stdio::piped());
    let mut sampler = command.spawn().expect("it starts");
    let mut output = BufReader::new(sampler.stdout.take().expect("piped"));
    let mut said = String::new();
    output.read_line(&mut said).expect("text");
    let found = run();
    sampler.kill().expect("it is ours");
    output.read_to_string(&mut said).expect("text");
    sampler.wait().expect("it is ours");
    (found, said)
}

/// The mean utilisation of each second that was sampled from its beginning to its end, of lines
/// such as `2024/05/14 09:21:33.512, 24`. Lines that are none, as where the GPU does not say, are
/// left out.
pub(crate) fn means_of_seconds(said: &str) -> Vec<f64> {
    let samples: Vec<_> = said.lines().filter_map(sample).collect();
    let seconds = samples.chunk_by(|(one, _), (other, _)| one == other);
    let means = seconds
        .map(|second| second.iter().map(|(_, percent)| percent).sum::<f64>() / second.len() as f64);
    let means: Vec<_> = means.collect();
    // The first and the last second are not whole.
    means.get(1..means.len().saturating_sub(1)).unwrap_or_default().to_vec()
}

/// The second, and the utilisation in percent.
fn sample(line: &str) -> Option<(&str, f64)> {
    let (time, percent) = line.split_once(", ")?;
    let (second, _) = time.split_once('.')?;
    Some((second, percent.trim().parse().ok()?))
}

/// Returns the mean absolute error of windows from a cap.
pub(crate) fn mean_absolute_error(means: &[f64], cap: f64) -> f64 {
    means.iter().map(|mean| (mean - cap).abs()).sum::<f64>() / means.len() as f64
}

/// Total and used memory, as the program prints them in MiB.
pub(crate) fn total_and_used(said: &str) -> Option<[f64; 2]> {
    let (total, used) = said.trim().split_once(", ")?;
    Some([total.parse().ok()?, used.parse().ok()?])
}

/// Returns its report in a container: the cap as the GPU's memory, and `used` as used. It rounds to
/// MiB.
pub(super) fn memory(harness: &Harness<'_>, mode: Mode, share: &NodeShare, used: f64) -> String {
    let program = harness.programs.smi.as_ref().expect("asked only where there is one");
    let id = format!("--id={}", harness.gpu.uuid);
    let output = harness
        .container(mode, share)
        .run(program, &["--query-gpu=memory.total,memory.used", LINES, &id]);
    let said = String::from_utf8_lossy(&output.stdout);
    let Some([total, seen]) = total_and_used(&said) else {
        let error = String::from_utf8_lossy(&output.stderr);
        return format!(
            "**failed**: it says `{}`",
            format!("{said}{error}").trim().replace('\n', " ")
        );
    };
    let near = |mib: f64, bytes: f64| (mib - bytes / MIB as f64).abs() <= 1.0;
    let figure = format!("{seen:.0} of {total:.0} MiB used, {} by NVML", mib(used));
    judged(&figure, near(total, share.grant.memory_limit_bytes as f64) && near(seen, used))
}
