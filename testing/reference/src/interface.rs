//! Pages of names that objects in the cluster carry.

use tessera_api::config::{self, EffectiveConfig};
use tessera_api::events::{self, Reporter};
use tessera_api::metrics::{self, MetricDescription};
use tessera_api::names::{self, attribute, capacity};

use crate::Page;
use crate::table::{code, header, table};

pub(crate) fn events() -> Page {
    let mut text = header("Events", "api/src/events.rs");
    text.push_str(
        "All events are Warnings. `kubectl describe pod NAME` and `kubectl tessera explain pod NAME`\n\
         show them; `kubectl get events --field-selector reason=REASON` selects them.\n\n\
         Codes such as `NodeReserved` or `Short` are not events: `InsufficientDevices` counts them,\n\
         see [reasons](reasons.md).\n",
    );
    for (reporter, title) in
        [(Reporter::Controller, "tessera-controller"), (Reporter::Driver, "tessera-driver")]
    {
        let rows: Vec<Vec<String>> = events::ALL
            .iter()
            .map(|(_, reason)| reason)
            .filter(|reason| reason.reporter() == reporter)
            .map(|reason| {
                let [meaning, action] = [reason.meaning(), reason.action()].map(str::to_owned);
                vec![code(reason.name()), reason.regarding().to_owned(), meaning, action]
            })
            .collect();
        text.push_str(&format!(
            "\n## {title}\n\n`reportingController`: `{}`.\n\n",
            reporter.name()
        ));
        text.push_str(&table(&["Reason", "On", "Meaning", "What to do"], &rows));
    }
    Page { path: "docs/reference/events.md", text }
}

pub(crate) fn metrics() -> Page {
    const GROUPS: [(&str, &str); 5] = [
        ("tessera_controller_", "tessera-controller (port 9401)"),
        ("tessera_driver_", "tessera-driver (port 9400)"),
        ("tessera_gpu_", "GPUs (exported by tessera-driver)"),
        ("tessera_mps_", "MPS control daemons (exported by tessera-driver)"),
        ("tessera_share_", "Shares (exported by tessera-driver)"),
    ];
    let mut text = header("Metrics", "api/src/metrics.rs");
    text.push_str("Both programs serve `/metrics` in the OpenMetrics text format.\n");
    for (prefix, title) in GROUPS {
        let rows: Vec<Vec<String>> = metrics::ALL
            .iter()
            .map(|(_, metric)| metric)
            .filter(|metric| metric.name().starts_with(prefix))
            .map(metric_row)
            .collect();
        text.push_str(&format!("\n## {title}\n\n"));
        text.push_str(&table(&["Metric", "Type", "Labels", "Meaning"], &rows));
    }
    Page { path: "docs/reference/metrics.md", text }
}

fn metric_row(metric: &MetricDescription) -> Vec<String> {
    let labels: Vec<String> = metric.labels().iter().map(|label| code(label)).collect();
    vec![
        code(&format!("{}{}", metric.name(), metric.kind().suffix())),
        metric.kind().name().to_owned(),
        labels.join(", "),
        format!("{}.", metric.help()),
    ]
}

pub(crate) fn config() -> Page {
    let defaults = EffectiveConfig::default();
    let mut text = header("GpuConfig", "api/src/config/");
    text.push_str(&format!(
        "Opaque parameters of a DeviceClass or a ResourceClaim for the driver `{}`.\n\
         A claim overrides its class field by field. Unknown fields and values are refused.\n\n\
         ```yaml\n\
         apiVersion: {}\n\
         kind: {}\n\
         ```\n\n",
        names::DRIVER_NAME,
        config::API_VERSION,
        config::KIND,
    ));
    let rows: Vec<Vec<String>> = config::FIELDS
        .iter()
        .map(|field| {
            let default = (field.default)(&defaults);
            vec![code(field.path), field.kind.to_owned(), default, field.meaning.to_owned()]
        })
        .collect();
    text.push_str(&table(&["Field", "Type", "Default", "Meaning"], &rows));
    for field in config::FIELDS {
        let values = (field.values)();
        if values.is_empty() {
            continue;
        }
        let rows: Vec<Vec<String>> = values
            .iter()
            .map(|(value, meaning)| vec![code(value), (*meaning).to_owned()])
            .collect();
        text.push_str(&format!("\n## {}\n\n", code(field.path)));
        text.push_str(&table(&["Value", "Meaning"], &rows));
    }
    Page { path: "docs/reference/config.md", text }
}

pub(crate) fn attributes() -> Page {
    let mut text = header("Device attributes, capacities and taints", "api/src/names.rs");
    text.push_str(&format!(
        "Names without a domain belong to `{domain}`: in CEL\n\
         `device.attributes[\"{domain}\"].productName`.\n\n## Attributes\n\n",
        domain = names::DRIVER_NAME,
    ));
    let rows: Vec<Vec<String>> = attribute::ALL
        .iter()
        .map(|(name, kind, meaning)| vec![code(name), (*kind).to_owned(), (*meaning).to_owned()])
        .collect();
    text.push_str(&table(&["Attribute", "Type", "Meaning"], &rows));
    text.push_str("\n## Capacities\n\n");
    let rows: Vec<Vec<String>> = capacity::ALL
        .iter()
        .chain(&capacity::ENGINES)
        .map(|(name, meaning)| vec![code(name), (*meaning).to_owned()])
        .collect();
    text.push_str(&table(&["Capacity", "Meaning"], &rows));
    text.push_str("\n## Taints\n\nAll have the effect `NoSchedule`.\n\n");
    let rows: Vec<Vec<String>> =
        names::TAINTS.iter().map(|(key, meaning)| vec![code(key), (*meaning).to_owned()]).collect();
    text.push_str(&table(&["Taint", "Meaning"], &rows));
    Page { path: "docs/reference/attributes.md", text }
}

/// Program, code, meaning.
const EXIT_CODES: [(&str, &str, &str); 9] = [
    ("kubectl-tessera", "0", "Success: shown, saved, allocated, everything fits."),
    ("kubectl-tessera", "1", "An error, also of the command line."),
    (
        "kubectl-tessera",
        "2",
        "`explain`: the pod or claim is pending; `simulate`: a pod does not fit; `defrag`: no moves help, or one more pod does not fit; `convert`: an object is refused.",
    ),
    ("tessera-controller", "0", "Stopped by a signal."),
    (
        "tessera-controller",
        "1",
        "An error, also the loss of the Lease; the kubelet restarts the container.",
    ),
    ("tessera-driver", "0", "Stopped by a signal, or `--print-slices` has printed."),
    (
        "tessera-driver",
        "1",
        "An error, or a task of the driver ended unexpectedly; the log has the reason.",
    ),
    ("tessera-mps", "0", "Stopped by a signal."),
    ("tessera-mps", "1", "An error; the log has the reason."),
];

pub(crate) fn exit_codes() -> Page {
    let mut text = header("Exit codes", "testing/reference/src/interface.rs");
    let rows: Vec<Vec<String>> = EXIT_CODES
        .iter()
        .map(|(program, exit, meaning)| {
            vec![code(program), (*exit).to_owned(), (*meaning).to_owned()]
        })
        .collect();
    text.push_str(&table(&["Program", "Code", "Meaning"], &rows));
    text.push_str("\nThe daemons exit with 2 if the command line cannot be parsed, and with 1 if flags exclude each\n\
         other.\n");
    Page { path: "docs/reference/exit-codes.md", text }
}
