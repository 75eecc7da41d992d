//! The program: from the command line to the exit code.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use k8s_openapi::jiff::Timestamp;
use tessera_allocator::PlanSettings;
use tessera_api::events;
use tessera_api::names::{ClaimName, DRIVER_NAME, Namespace, PodName};
use tessera_api::resize::ShareSize;
use tessera_dialect::{Converter, Settings};

use crate::args::{
    ConnectionArgs, ConvertArgs, CordonArgs, CordonGpuArgs, CordonedDevice, DefragArgs,
    DefragPodArgs, DefragRequest, DefragRequestsArgs, DoctorArgs, DrainArgs, DrainGpuArgs,
    DrainedDevice, ExplainArgs, ExplainSubject, PluginArgs, PluginCommand, PolicyName, QuotaArgs,
    ResizeArgs, SimulateArgs, SnapshotArgs, SourceArgs, TreeArgs,
};
use crate::cluster::Cluster;
use crate::convert::{Conversions, ManifestFile};
use crate::defragment::{self, Apply, ApplyOptions, DefragmentationResult};
use crate::explain::PlanView;
use crate::maintenance::{Cordons, Drain, DrainOptions, GpuChange, GpuName, TargetGpu};
use crate::output::{count, render};
use crate::resize::{Resize, ResizeRequest};
use crate::snapshot::{IndexedSnapshot, Snapshot, VERSION};
use crate::terminal::escape;
use crate::{convert, doctor, explain, input, maintenance, quota, resize, simulate, tree, usage};

/// Exit status of a command without errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitStatus {
    /// Exit code 0.
    Success,
    /// Exit code 2: the pod or claim is pending, or a pod does not fit.
    Pending,
    /// Exit code 2: an object cannot be converted.
    Refused,
    /// Exit code 2: there are errors or warnings.
    Problems,
}

/// Parses the command line and runs the command.
pub async fn main() -> ExitCode {
    let args = match PluginArgs::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // Help and version are no errors. clap's own code for errors, 2, means pending here.
            let code = if error.use_stderr() { 1 } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    match run(args).await {
        Ok((text, status)) => match std::io::stdout().write_all(text.as_bytes()) {
            // A closed pipe is no error: `head` closes it after the lines that it needs.
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => fail(&error.into()),
            _ => ExitCode::from(if status == ExitStatus::Success { 0 } else { 2 }),
        },
        Err(error) => fail(&error),
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {}", escape(&error_text(error)));
    ExitCode::from(1)
}

/// Returns an error with its causes, each once: the texts of some errors include their cause.
fn error_text(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Runs the command. Returns the text for the standard output.
async fn run(args: PluginArgs) -> anyhow::Result<(String, ExitStatus)> {
    let PluginArgs { command, connection } = args;
    match command {
        PluginCommand::Tree(args) => show_tree(args, &connection).await,
        PluginCommand::Explain(args) => explain(args, &connection).await,
        PluginCommand::Quota(args) => show_quotas(args, &connection).await,
        PluginCommand::Doctor(args) => diagnose(args, &connection).await,
        PluginCommand::Simulate(args) => simulate(args, &connection).await,
        PluginCommand::Convert(args) => convert(args, &connection),
        PluginCommand::Cordon(CordonArgs { device: CordonedDevice::Gpu(args) }) => {
            change_cordons(args, &connection, true).await
        }
        PluginCommand::Uncordon(CordonArgs { device: CordonedDevice::Gpu(args) }) => {
            change_cordons(args, &connection, false).await
        }
        PluginCommand::Drain(DrainArgs { device: DrainedDevice::Gpu(args) }) => {
            drain(args, &connection).await
        }
        PluginCommand::Defrag(DefragArgs { request: DefragRequest::Pod(args) }) => {
            defragment(args, &connection).await
        }
        PluginCommand::Defrag(DefragArgs { request: DefragRequest::Requests(args) }) => {
            show_likely_requests(args, &connection).await
        }
        PluginCommand::Resize(args) => resize(args, &connection).await,
        PluginCommand::Snapshot(args) => save(args, &connection).await,
    }
}

/// Returns the GPUs with these names, and what the tree says of each.
fn resolve_all(tree: &tree::GpuTree, names: &[GpuName]) -> anyhow::Result<Vec<TargetGpu>> {
    let resolve = |name| maintenance::resolve(tree, name).map(|(gpu, _)| gpu);
    Ok(names.iter().map(resolve).collect::<Result<BTreeSet<_>, _>>()?.into_iter().collect())
}

async fn read_tree(cluster: &Cluster) -> anyhow::Result<tree::GpuTree> {
    let indexed = cluster.read().await?.indexed();
    Ok(tree::GpuTree::read(&indexed.index, &tree::TreeFilter::default()))
}

async fn change_cordons(
    args: CordonGpuArgs,
    connection: &ConnectionArgs,
    cordons: bool,
) -> anyhow::Result<(String, ExitStatus)> {
    let cluster = Cluster::connect(&connection.target()).await?;
    let tree = read_tree(&cluster).await?;
    let gpus = resolve_all(&tree, &args.gpus)?;
    let rules = Cordons::new(cluster.client().clone(), args.dry_run);
    let mut changes = Vec::new();
    for gpu in gpus {
        let change = if cordons { rules.cordon(&gpu).await? } else { rules.uncordon(&gpu).await? };
        changes.push(GpuChange::new(gpu, change, args.dry_run));
    }
    if !cordons {
        for line in maintenance::other_taints(&tree, &changes) {
            eprintln!("warning: {}", escape(&line));
        }
    }
    Ok((render(&changes, args.output, |all| maintenance::changes_text(all))?, ExitStatus::Success))
}

async fn drain(
    args: DrainGpuArgs,
    connection: &ConnectionArgs,
) -> anyhow::Result<(String, ExitStatus)> {
    let DrainGpuArgs { cordon, force, grace_period, timeout } = args;
    let cluster = Cluster::connect(&connection.target()).await?;
    let gpus = resolve_all(&read_tree(&cluster).await?, &cordon.gpus)?;
    let options = DrainOptions { force, grace_period, timeout, is_dry_run: cordon.dry_run };
    let mut progress = |line: &str| eprintln!("{}", escape(line));
    let (client, evictions) = (cluster.client().clone(), cluster.client_without_retries()?);
    let drain = Drain::new(client, evictions, gpus.clone(), options, &mut progress);
    let read = async || anyhow::Ok(maintenance::claims_on(&read_tree(&cluster).await?, &gpus));
    let report = drain.run(read).await?;
    Ok((render(&report, cordon.output, maintenance::report_text)?, ExitStatus::Success))
}

async fn defragment(
    args: DefragPodArgs,
    connection: &ConnectionArgs,
) -> anyhow::Result<(String, ExitStatus)> {
    let pod = pod_name(&args.pod)?;
    let source = Source::open(&args.source, connection).await?;
    let namespace = source.namespace(connection)?;
    let indexed = source.indexed();
    let view = PlanView::new(&source.snapshot, &indexed, PolicyName::settings(None), source.now);
    let found = defragment::defragment(&view, &namespace, &pod)?;
    let text = render(&found, args.output, defragment::text)?;
    let is_pending = found.result == DefragmentationResult::DoesNotFit;
    if let Some(cluster) = source.cluster.as_ref().filter(|_| args.apply && !is_pending) {
        let options = ApplyOptions { force: args.force, timeout: args.timeout };
        let mut progress = |line: &str| eprintln!("{}", escape(line));
        let (client, evictions) = (cluster.client().clone(), cluster.client_without_retries()?);
        Apply::new(client, evictions, options, &mut progress).run(&found).await?;
    }
    Ok((text, status(is_pending)))
}

async fn show_likely_requests(
    args: DefragRequestsArgs,
    connection: &ConnectionArgs,
) -> anyhow::Result<(String, ExitStatus)> {
    let source = Source::open(&args.source, connection).await?;
    let indexed = source.indexed();
    let view = PlanView::new(&source.snapshot, &indexed, PolicyName::settings(None), source.now);
    let found = defragment::likely_requests(&view, args.top.get());
    let headers = !args.output.no_headers;
    let text =
        render(&found, args.output.output, |found| defragment::requests_text(found, headers))?;
    let is_short = found.iter().any(|one| one.found.result != DefragmentationResult::Fits);
    Ok((text, status(is_short)))
}

async fn resize(
    args: ResizeArgs,
    connection: &ConnectionArgs,
) -> anyhow::Result<(String, ExitStatus)> {
    let ResizeArgs { claim, memory, cores, request, timeout, no_wait, output } = args;
    let cluster = Cluster::connect(&connection.target()).await?;
    let namespace = connection.namespace.clone().unwrap_or_else(|| cluster.namespace().to_owned());
    let timeout = (!no_wait).then_some(timeout);
    let asked = ResizeRequest { claim, request, size: ShareSize { memory, cores }, timeout };
    let mut progress = |line: &str| eprintln!("{}", escape(line));
    let change = Resize::new(cluster.client().clone(), namespace, &mut progress);
    let report = change.run(&asked).await?;
    Ok((render(&report, output, resize::text)?, ExitStatus::Success))
}

/// The objects that a command reads.
struct Source {
    snapshot: Snapshot,
    /// The connection; none for a file.
    cluster: Option<Cluster>,
    /// Time of the snapshot.
    now: Timestamp,
}

impl Source {
    async fn open(source: &SourceArgs, connection: &ConnectionArgs) -> anyhow::Result<Self> {
        if let Some(path) = &source.snapshot {
            let snapshot = Snapshot::load(path)?;
            let now = snapshot.taken_at;
            return Ok(Self { snapshot, cluster: None, now });
        }
        let cluster = Cluster::connect(&connection.target()).await?;
        let snapshot = cluster.read().await?;
        Ok(Self { snapshot, cluster: Some(cluster), now: Timestamp::now() })
    }

    /// Returns the namespace of the command line, of the context, or `default`.
    fn namespace(&self, connection: &ConnectionArgs) -> anyhow::Result<Namespace> {
        let context = self.cluster.as_ref().map(Cluster::namespace);
        let name = connection.namespace.as_deref().or(context).unwrap_or("default");
        Namespace::new(name).with_context(|| format!("invalid namespace `{name}`"))
    }

    /// Builds the index, with a warning for each object that cannot be read.
    fn indexed(&self) -> IndexedSnapshot {
        let indexed = self.snapshot.indexed();
        for error in &indexed.refused {
            eprintln!("warning: object ignored: {}", escape(&error.to_string()));
        }
        indexed
    }
}

async fn show_tree(
    args: TreeArgs,
    connection: &ConnectionArgs,
) -> anyhow::Result<(String, ExitStatus)> {
    let source = Source::open(&args.source, connection).await?;
    let namespace =
        connection.namespace.as_ref().map(|_| source.namespace(connection)).transpose()?;
    let filter = tree::TreeFilter { nodes: args.nodes.iter().cloned().collect(), namespace };
    let mut gpus = tree::GpuTree::read(&source.indexed().index, &filter);
    let unknown = args.nodes.iter().find(|name| !gpus.nodes.iter().any(|node| node.name == **name));
    if let Some(unknown) = unknown.filter(|_| filter.namespace.is_none()) {
        anyhow::bail!(
            "node `{unknown}` publishes no GPUs through Tessera (list nodes with `kubectl tessera \
             tree`)"
        );
    }
    if let Some(cluster) = source.cluster.as_ref().filter(|_| args.usage) {
        for error in usage::add_usage(cluster.client(), &mut gpus).await? {
            eprintln!("warning: {}", escape(&error_text(&error.into())));
        }
    }
    let headers = !args.output.no_headers;
    let text = |gpus: &tree::GpuTree| {
        if args.claims { tree::claims_text(gpus, headers) } else { tree::tree_text(gpus, headers) }
    };
    Ok((render(&gpus, args.output.output, text)?, ExitStatus::Success))
}

async fn diagnose(
    args: DoctorArgs,
    connection: &ConnectionArgs,
) -> anyhow::Result<(String, ExitStatus)> {
    let source = Source::open(&args.source, connection).await?;
    let indexed = source.snapshot.indexed();
    let view = PlanView::new(&source.snapshot, &indexed, PolicyName::settings(None), source.now);
    let tree = tree::GpuTree::read(&indexed.index, &tree::TreeFilter::default());
    let events = match &source.cluster {
        Some(cluster) => cluster.events_of(events::GPU_MEMORY_UNACCOUNTED.name()).await,
        None => Vec::new(),
    };
    let diagnosis = doctor::Diagnosis::new(&view, &tree, &indexed.refused, &events);
    let text = render(&diagnosis, args.output, doctor::text)?;
    let status = if diagnosis.has_problems() { ExitStatus::Problems } else { ExitStatus::Success };
    Ok((text, status))
}

async fn show_quotas(
    args: QuotaArgs,
    connection: &ConnectionArgs,
) -> anyhow::Result<(String, ExitStatus)> {
    let source = Source::open(&args.source, connection).await?;
    let namespace = (!args.all_namespaces).then(|| source.namespace(connection)).transpose()?;
    if let Some(because) = source.snapshot.not_read("gpuquotas.gpu.tessera.dev") {
        anyhow::bail!(
            "cannot list gpuquotas.gpu.tessera.dev: {because} (install the chart of this version, \
             or ask an administrator for the ClusterRole tessera-viewer)"
        );
    }
    let indexed = source.indexed();
    let view = PlanView::new(&source.snapshot, &indexed, PolicyName::settings(None), source.now);
    let report = quota::QuotaReport::new(&view, namespace.as_ref());
    let headers = !args.output.no_headers;
    let text = |report: &quota::QuotaReport| quota::text(report, headers);
    Ok((render(&report, args.output.output, text)?, ExitStatus::Success))
}

async fn explain(
    args: ExplainArgs,
    connection: &ConnectionArgs,
) -> anyhow::Result<(String, ExitStatus)> {
    let subject = ExplainSubject::parse(&args.subject)?;
    let source = Source::open(&args.source, connection).await?;
    let namespace = source.namespace(connection)?;
    let indexed = source.indexed();
    let view = PlanView::new(&source.snapshot, &indexed, PolicyName::settings(None), source.now);
    let claim_name = match subject {
        ExplainSubject::Pod(name) => {
            let name = pod_name(&name)?;
            let events = match &source.cluster {
                Some(cluster) => cluster.events(namespace.as_str(), "Pod", name.as_str()).await,
                None => Vec::new(),
            };
            let report = explain::pod(&view, &namespace, &name, &events)?;
            let text =
                render(&report, args.output, |report| explain::pod_text(report, source.now))?;
            return Ok((text, status(report.state.is_pending())));
        }
        ExplainSubject::Claim(name) => ClaimName::new(&name)
            .with_context(|| format!("invalid name of a ResourceClaim `{name}`"))?,
        ExplainSubject::PodClaim { pod, entry } => {
            explain::claim_of_entry(&view, &namespace, &pod_name(&pod)?, &entry)?
        }
    };
    let report = explain::claim(&view, &namespace, &claim_name)?;
    let text = render(&report, args.output, |report| explain::claim_text(report, source.now))?;
    Ok((text, status(report.is_pending)))
}

fn pod_name(name: &str) -> anyhow::Result<PodName> {
    PodName::new(name).with_context(|| format!("invalid name of a pod `{name}`"))
}

fn status(is_pending: bool) -> ExitStatus {
    if is_pending { ExitStatus::Pending } else { ExitStatus::Success }
}

async fn simulate(
    args: SimulateArgs,
    connection: &ConnectionArgs,
) -> anyhow::Result<(String, ExitStatus)> {
    let manifests = read_all(&args.files)?;
    let source = Source::open(&args.source, connection).await?;
    let namespace = source.namespace(connection)?;
    let settings = PlanSettings { seed: args.seed, ..PolicyName::settings(args.policy) };
    let result =
        simulate::simulate(&source.snapshot, &manifests, &namespace, settings, args.preempt)
            .with_context(|| format!("cannot simulate {}", names(&args.files)))?;
    let headers = !args.output.no_headers;
    let text = render(&result, args.output.output, |result| simulate::text(result, headers))?;
    Ok((text, status(!result.fits())))
}

fn convert(args: ConvertArgs, connection: &ConnectionArgs) -> anyhow::Result<(String, ExitStatus)> {
    let settings = dialect_settings(&args)?;
    let converter = Converter::new(settings).context(match &args.settings {
        Some(path) => format!("invalid settings in {}", path.display()),
        None => "invalid --dialect".to_owned(),
    })?;
    let conversions = Conversions {
        converter: &converter,
        namespace: connection.namespace.as_deref().unwrap_or("default"),
        template_paths: &args.pod_template_path,
        add_tolerations: args.add_tolerations,
    };
    let files = ManifestFile::read_all(&args.files, args.recursive)?;
    let converted = conversions.convert(&files)?;
    let status =
        if converted.report.is_refused() { ExitStatus::Refused } else { ExitStatus::Success };
    if args.check {
        return Ok((render(&converted.report, args.output, convert::text)?, status));
    }
    eprint!("{}", escape(&convert::text(&converted.report)));
    let manifests = if status == ExitStatus::Refused {
        eprintln!("error: no manifests are printed, since an object is refused");
        String::new()
    } else {
        converted.manifests
    };
    Ok((manifests, status))
}

/// Returns the settings of the file, or the defaults; dialects of the command line come in the
/// place of those that the file has as `default`.
fn dialect_settings(args: &ConvertArgs) -> anyhow::Result<Settings> {
    let defaults = Settings::with_defaults(&args.dialect);
    let Some(path) = &args.settings else { return Ok(defaults) };
    let cannot = || format!("cannot read the settings in {}", path.display());
    let text = input::read(path).with_context(cannot)?;
    let settings: Settings = crate::yaml::from_str(&text).with_context(cannot)?;
    Ok(if args.dialect.is_empty() { settings } else { settings.selecting(&args.dialect) })
}

async fn save(
    args: SnapshotArgs,
    connection: &ConnectionArgs,
) -> anyhow::Result<(String, ExitStatus)> {
    let snapshot = Cluster::connect(&connection.target()).await?.read().await?;
    for not in &snapshot.not_read {
        eprintln!("warning: snapshot without {}: {}", not.resource, escape(&not.because));
    }
    let content = content(&snapshot);
    let text = match &args.output {
        Some(path) => {
            snapshot.save(path)?;
            let bytes = std::fs::metadata(path).map(|file| file.len()).unwrap_or_default();
            let kib = bytes.div_ceil(1024);
            eprintln!("saved {}: {content} ({kib} KiB, format {VERSION})", path.display());
            String::new()
        }
        None => {
            let mut text = Vec::new();
            snapshot.write_to(&mut text).context("cannot write the snapshot")?;
            eprintln!("snapshot: {content} (format {VERSION})");
            String::from_utf8(text).context("JSON is UTF-8")?
        }
    };
    Ok((text, ExitStatus::Success))
}

/// Returns the numbers of objects in a snapshot as text.
fn content(snapshot: &Snapshot) -> String {
    let slices = snapshot.resource_slices.iter();
    let ours = slices.filter(|slice| slice.spec.driver == DRIVER_NAME);
    let gpus = ours.map(|slice| slice.spec.devices.as_ref().map_or(0, Vec::len)).sum();
    [
        count(snapshot.nodes.len(), "node"),
        count(gpus, "GPU"),
        count(snapshot.resource_claims.len(), "ResourceClaim"),
        count(snapshot.pods.len(), "pod"),
    ]
    .join(", ")
}

/// Returns the documents of all files.
fn read_all(files: &[PathBuf]) -> anyhow::Result<String> {
    let mut all = String::new();
    for path in files {
        let text = input::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        // A separator between two files. The last one adds an empty document, which is skipped.
        all.push_str(&text);
        all.push_str("\n---\n");
    }
    Ok(all)
}

fn names(files: &[PathBuf]) -> String {
    files.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_each_cause_once() {
        let error = anyhow::anyhow!("file not found");
        assert_eq!(error_text(&error.context("cannot read a")), "cannot read a: file not found");
        let repeated = anyhow::anyhow!("no such file").context("cannot load: no such file");
        assert_eq!(error_text(&repeated), "cannot load: no such file");
    }
}
