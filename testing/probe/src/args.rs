//! Command line.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand};

use crate::compute;
use crate::cuda::Cuda;
use crate::memory::{self, Bytes};
use crate::nvml::Nvml;
use crate::report::{Device, DeviceList, Event, Failure, Filled, report};
use crate::signals::Signals;
use crate::tamper::Tamper;

/// Report the visible GPUs and allocate memory until the limit; one JSON object per line.
#[derive(Debug, Parser)]
#[command(name = "tessera-probe", version)]
pub(crate) struct ProbeArgs {
    #[command(subcommand)]
    command: Command,
    /// CUDA driver library.
    #[arg(long, global = true, default_value = "libcuda.so.1")]
    cuda: PathBuf,
    /// NVML library.
    #[arg(long, global = true, default_value = "libnvidia-ml.so.1")]
    nvml: PathBuf,
    /// First attempt this attack on the container's grants and ledgers, as a tenant might.
    #[arg(long, value_enum)]
    tamper: Option<Tamper>,
    /// Directory of a forged grant.
    #[arg(long, default_value = "/dev/tessera")]
    forge_into: PathBuf,
    /// ID of the forged grant.
    #[arg(long, default_value = "forged")]
    forge_id: String,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Report the GPUs and their memory.
    See,
    /// Allocate memory until it is refused.
    Fill(Fill),
    /// Allocate memory and hold it until SIGTERM or SIGINT.
    Hold(Hold),
    /// Use no GPU.
    Nothing,
}

#[derive(Debug, ClapArgs)]
struct Fill {
    /// Index of the GPU.
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// Size of an allocation; halved down to 1Mi when it is refused.
    #[arg(long, default_value = "256Mi")]
    chunk: Bytes,
    /// First launch kernels for this many milliseconds and report their share of the GPU's time.
    #[arg(long)]
    compute_ms: Option<u64>,
    /// Hold the memory until SIGTERM or SIGINT.
    #[arg(long)]
    hold: bool,
}

#[derive(Debug, ClapArgs)]
struct Hold {
    /// Index of the GPU.
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// Bytes to allocate.
    #[arg(long, default_value = "1Gi")]
    take: Bytes,
}

impl ProbeArgs {
    /// Runs the command.
    pub(crate) fn run(self, signals: &Signals) -> Result<(), Failure> {
        let Self { command, cuda: library, nvml, tamper, forge_into, forge_id } = self;
        if let Some(tamper) = tamper {
            report(&Event::Tampered(tamper.attempt(&forge_into, &forge_id)?));
        }
        if matches!(command, Command::Nothing) {
            return Ok(());
        }
        let cuda = Cuda::open(&library)?;
        let nvml = Nvml::open(&nvml)?;
        report(&Event::See(devices(&cuda, &nvml)?));
        match command {
            Command::See | Command::Nothing => Ok(()),
            Command::Fill(options) => fill(&cuda, &library, &nvml, &options, signals),
            Command::Hold(options) => hold(&cuda, &options, signals),
        }
    }
}

fn devices(cuda: &Cuda, nvml: &Nvml) -> Result<DeviceList, Failure> {
    let devices = (0..cuda.count()?)
        .map(|index| describe_device(cuda, nvml, index))
        .collect::<Result<_, _>>()?;
    Ok(DeviceList { devices, cuda_version: cuda.version()? })
}

fn describe_device(cuda: &Cuda, nvml: &Nvml, index: i32) -> Result<Device, Failure> {
    let device = cuda.device(index)?;
    let uuid = device.uuid()?;
    let info = device.context()?.memory()?;
    let memory = nvml.memory(&uuid)?;
    Ok(Device {
        index,
        name: device.name()?,
        multiprocessors: device.multiprocessors()?,
        cuda_total_bytes: device.total()?,
        cuda_free_bytes: info.free,
        nvml_total_bytes: memory.total,
        nvml_used_bytes: memory.used,
        nvml_free_bytes: memory.free,
        uuid,
    })
}

fn fill(
    cuda: &Cuda,
    library: &Path,
    nvml: &Nvml,
    options: &Fill,
    signals: &Signals,
) -> Result<(), Failure> {
    let device = cuda.device(options.device)?;
    let context = device.context()?;
    // Before memory is full: loading a kernel takes some.
    if let Some(milliseconds) = options.compute_ms {
        let time = Duration::from_millis(milliseconds);
        report(&Event::Computed(compute::measure(library, time)?));
    }
    let (taken_bytes, refused_with) = memory::fill(&context, options.chunk);
    let memory = nvml.memory(&device.uuid()?)?;
    report(&Event::Filled(Filled {
        device: options.device,
        taken_bytes,
        refused_with,
        nvml_used_bytes: memory.used,
        nvml_total_bytes: memory.total,
        cuda_free_bytes: context.memory()?.free,
    }));
    if options.hold {
        report(&Event::Holding { taken_bytes: None });
        signals.wait();
    }
    Ok(())
}

fn hold(cuda: &Cuda, options: &Hold, signals: &Signals) -> Result<(), Failure> {
    let context = cuda.device(options.device)?.context()?;
    context.allocate(options.take.0)?;
    report(&Event::Holding { taken_bytes: Some(options.take.0) });
    signals.wait();
    Ok(())
}
