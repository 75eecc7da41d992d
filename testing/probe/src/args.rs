//! What to do.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand};

use crate::compute;
use crate::cuda::Cuda;
use crate::memory::{self, Bytes};
use crate::nvml::Nvml;
use crate::report::{Device, Event, Failure, Filled, See, say};
use crate::signals::Signals;
use crate::tamper::Tamper;

/// Says which GPUs it sees and takes memory until refused; one JSON object a line.
#[derive(Debug, Parser)]
#[command(name = "tessera-probe", version)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
    /// The CUDA driver library.
    #[arg(long, global = true, default_value = "libcuda.so.1")]
    cuda: PathBuf,
    /// The NVML library.
    #[arg(long, global = true, default_value = "libnvidia-ml.so.1")]
    nvml: PathBuf,
    /// Try this against the container's grants and ledgers first, as a tenant might.
    #[arg(long, value_enum)]
    tamper: Option<Tamper>,
    /// Where a forged grant is made.
    #[arg(long, default_value = "/dev/tessera")]
    forge_into: PathBuf,
    /// The id that it has.
    #[arg(long, default_value = "forged")]
    forge_id: String,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Says which GPUs there are and how much memory they have.
    See,
    /// Takes memory until it is refused.
    Fill(Fill),
    /// Takes memory and holds it until SIGTERM or SIGINT.
    Hold(Hold),
    /// Looks at no GPU.
    Nothing,
}

#[derive(Debug, ClapArgs)]
struct Fill {
    /// Index of the GPU.
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// How much to take at a time; halved down to 1Mi when it is refused.
    #[arg(long, default_value = "256Mi")]
    chunk: Bytes,
    /// First launch kernels for this many milliseconds and report their share of the GPU's time.
    #[arg(long)]
    compute_ms: Option<u64>,
    /// Hold what was taken until SIGTERM or SIGINT.
    #[arg(long)]
    hold: bool,
}

#[derive(Debug, ClapArgs)]
struct Hold {
    /// Index of the GPU.
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// How much to take.
    #[arg(long, default_value = "1Gi")]
    take: Bytes,
}

impl Args {
    /// Does it.
    pub(crate) fn run(self, signals: &Signals) -> Result<(), Failure> {
        let Self { command, cuda: library, nvml, tamper, forge_into, forge_id } = self;
        if let Some(tamper) = tamper {
            say(&Event::Tampered(tamper.attempt(&forge_into, &forge_id)?));
        }
        if matches!(command, Command::Nothing) {
            return Ok(());
        }
        let cuda = Cuda::open(&library)?;
        let nvml = Nvml::open(&nvml)?;
        say(&Event::See(see(&cuda, &nvml)?));
        match command {
            Command::See | Command::Nothing => Ok(()),
            Command::Fill(options) => fill(&cuda, &library, &nvml, &options, signals),
            Command::Hold(options) => hold(&cuda, &options, signals),
        }
    }
}

fn see(cuda: &Cuda, nvml: &Nvml) -> Result<See, Failure> {
    let devices =
        (0..cuda.count()?).map(|index| see_device(cuda, nvml, index)).collect::<Result<_, _>>()?;
    Ok(See { devices, cuda_version: cuda.version()? })
}

fn see_device(cuda: &Cuda, nvml: &Nvml, index: i32) -> Result<Device, Failure> {
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
        say(&Event::Computed(compute::measure(library, time)?));
    }
    let (taken_bytes, refused_with) = memory::fill(&context, options.chunk);
    let memory = nvml.memory(&device.uuid()?)?;
    say(&Event::Filled(Filled {
        device: options.device,
        taken_bytes,
        refused_with,
        nvml_used_bytes: memory.used,
        nvml_total_bytes: memory.total,
        cuda_free_bytes: context.memory()?.free,
    }));
    if options.hold {
        say(&Event::Holding { taken_bytes: None });
        signals.wait();
    }
    Ok(())
}

fn hold(cuda: &Cuda, options: &Hold, signals: &Signals) -> Result<(), Failure> {
    let context = cuda.device(options.device)?.context()?;
    context.allocate(options.take.0)?;
    say(&Event::Holding { taken_bytes: Some(options.take.0) });
    signals.wait();
    Ok(())
}
