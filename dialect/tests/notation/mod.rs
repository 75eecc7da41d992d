//! Claims in one line: `main: 2x{3000Mi,30c} != pol=Balance topo=NUMA:Prefer`.
//!
//! Requests are separated by `; `, with the fields of their GpuConfig behind the share. `!=` is a
//! `distinctAttribute` of the GPU's UUID, `clique` a `matchAttribute` of its NVLink clique, `same=`
//! one of its UUID over several requests. `alone` is an exclusive GPU, `class=` a DeviceClass other
//! than that of all GPUs, `mig=` the profile that a selector demands.

use serde_json::Value;
use tessera_api::GpuConfig;
use tessera_api::config::RequestedCapacity;
use tessera_api::quantity::Quantity;

/// Returns the notation of a template's spec. Every configuration is decoded and checked against
/// its request.
pub(crate) fn notation(spec: &Value) -> String {
    let devices = &spec["spec"]["devices"];
    let requests = devices["requests"].as_array().expect("requests");
    let common = common_suffix(devices);
    let lines: Vec<_> = requests.iter().map(|request| one(request, devices, &common)).collect();
    format!("{}{}{common}", lines.join("; "), same(devices))
}

/// Returns the CEL expressions of the first request, which all requests have, but for profiles.
pub(crate) fn selectors(spec: &Value) -> Vec<&str> {
    let requests = spec["spec"]["devices"]["requests"].as_array().expect("requests");
    let of = |request| -> Vec<_> {
        expressions(request).filter(|expression| mig_profile(expression).is_none()).collect()
    };
    assert!(requests.iter().all(|request| of(request) == of(&requests[0])));
    of(&requests[0])
}

fn expressions(request: &Value) -> impl Iterator<Item = &str> {
    let selectors = request["exactly"]["selectors"].as_array();
    selectors.into_iter().flatten().filter_map(|s| s["cel"]["expression"].as_str())
}

fn mig_profile(expression: &str) -> Option<&str> {
    let quoted = expression.strip_prefix(r#"device.attributes["gpu.tessera.dev"].profile == "#)?;
    quoted.strip_prefix('"')?.strip_suffix('"')
}

fn config_of(request: &str, devices: &Value) -> GpuConfig {
    let configs = devices["config"].as_array();
    let applies = |config: &&Value| match config["requests"].as_array() {
        None => true,
        Some(names) => names.iter().any(|name| name == request),
    };
    let mut found = configs.into_iter().flatten().filter(applies);
    let config = found.next();
    assert!(found.next().is_none(), "two configurations of {request}");
    let Some(config) = config else { return GpuConfig::default() };
    assert_eq!(config["opaque"]["driver"], "gpu.tessera.dev");
    let config = GpuConfig::decode(&config["opaque"]["parameters"]).expect("valid parameters");
    config.effective().expect("supported and consistent");
    config
}

fn one(request: &Value, devices: &Value, common: &str) -> String {
    let name = request["name"].as_str().expect("a name");
    let exactly = &request["exactly"];
    let config = config_of(name, devices);
    let amounts = &exactly["capacity"]["requests"];
    let amount = |name: &str| amounts[name].as_str().map(|t| Quantity::parse(t).expect("quantity"));
    let requested = RequestedCapacity { memory: amount("memory"), cores: amount("cores") };
    config.check_request(requested).expect("the request agrees with its configuration");
    let share = if config.exclusive == Some(true) {
        let limit = config.memory.limit.map_or("all".to_owned(), |limit| limit.to_string());
        format!("{{{limit},alone}}")
    } else {
        let percent = config.memory.percent.map(|percent| percent.to_string());
        let memory = amounts["memory"].as_str().map(|text| {
            format!("{}Mi", Quantity::parse(text).expect("a quantity").floor_mib().expect("MiB"))
        });
        let memory = percent.or(memory).unwrap_or_else(|| "all".to_owned());
        format!("{{{memory},{}c}}", amounts["cores"].as_str().unwrap_or("0"))
    };
    let count = exactly["count"].as_u64().unwrap_or(1);
    let mut line = format!("{name}: {count}x{share}");
    match exactly["deviceClassName"].as_str().expect("a class") {
        "gpu.tessera.dev" => {}
        class => line.push_str(&format!(" class={class}")),
    }
    line.extend(expressions(request).filter_map(mig_profile).map(|name| format!(" mig={name}")));
    for constraint in devices["constraints"].as_array().into_iter().flatten() {
        let is_own = constraint["requests"] == serde_json::json!([name]);
        match (is_own, &constraint["distinctAttribute"], &constraint["matchAttribute"]) {
            (true, Value::String(attribute), _) => {
                assert_eq!(attribute, "gpu.tessera.dev/uuid");
                line.push_str(" !=");
            }
            (true, _, Value::String(attribute)) => {
                assert_eq!(attribute, "gpu.tessera.dev/nvlinkClique");
                line.push_str(" clique");
            }
            _ => {}
        }
    }
    let compute = config.compute;
    line.extend(compute.policy.map(|policy| format!(" pol={policy}")));
    line.extend(compute.limit.map(|limit| format!(" limit={limit}")));
    line.extend(compute.priority.map(|priority| format!(" prio={priority}")));
    line.extend(config.sharing.map(|sharing| format!(" {sharing}")));
    let terms: Vec<_> = config.topology.iter().flatten().collect();
    if !terms.is_empty() {
        let terms: Vec<_> = terms.iter().map(|t| format!("{}:{}", t.scope, t.mode)).collect();
        line.push_str(&format!(" topo={}", terms.join(",")));
    }
    let own = suffix(&config);
    assert_eq!(own, common, "placement and oversubscription are the pod's");
    line
}

fn common_suffix(devices: &Value) -> String {
    let name = devices["requests"][0]["name"].as_str().expect("a name");
    suffix(&config_of(name, devices))
}

fn suffix(config: &GpuConfig) -> String {
    let mut text = String::new();
    text.extend(config.placement.node.map(|policy| format!(" node={policy}")));
    text.extend(config.placement.device.map(|policy| format!(" device={policy}")));
    if config.memory.oversubscribe == Some(true) {
        text.push_str(" over");
    }
    text
}

fn same(devices: &Value) -> String {
    for constraint in devices["constraints"].as_array().into_iter().flatten() {
        let names = constraint["requests"].as_array().expect("requests");
        if names.len() > 1 {
            assert_eq!(constraint["matchAttribute"], "gpu.tessera.dev/uuid");
            let names: Vec<_> = names.iter().filter_map(Value::as_str).collect();
            return format!(" same={}", names.join(","));
        }
    }
    String::new()
}
