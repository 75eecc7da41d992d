//! Objects that attacks create.

use serde_json::{Value, json};
use tessera_e2e::inventory::DRIVER;

/// Image whose container starts no process on the simulated cluster.
pub const UNSTARTED_IMAGE: &str = "tessera/probe-unstarted:e2e";

/// Returns a claim of that name for these devices.
pub fn claim(name: &str, devices: &Value) -> Value {
    json!({"metadata": {"name": name}, "spec": {"devices": devices}})
}

/// Returns a claim template of that name for these devices.
pub fn template(name: &str, devices: &Value) -> Value {
    json!({"metadata": {"name": name}, "spec": {"spec": {"devices": devices}}})
}

/// Returns devices with one request for a share of a GPU.
pub fn share(memory: &str) -> Value {
    json!({"requests": [{"name": "gpu", "exactly": exactly(memory)}]})
}

/// Returns the content of a request for a share of a GPU.
pub fn exactly(memory: &str) -> Value {
    json!({"deviceClassName": DRIVER, "capacity": {"requests": {"memory": memory}}})
}

/// Returns a selector with that expression.
pub fn selector(expression: &str) -> Value {
    json!({"cel": {"expression": expression}})
}

/// Returns an entry of a pod's `resourceClaims` for an existing claim.
pub fn claim_entry(entry: &str, claim: &str) -> Value {
    json!({"name": entry, "resourceClaimName": claim})
}

/// Returns a pod with these entries of `resourceClaims`, all used by its container.
pub fn pod(name: &str, image: &str, entries: &[Value]) -> Value {
    let used: Vec<Value> = entries.iter().map(|entry| json!({"name": entry["name"]})).collect();
    json!({
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
            "resourceClaims": entries,
            "containers": [{
                "name": "main", "image": image, "imagePullPolicy": "Never",
                "command": ["tessera-probe", "hold", "--take", "1Mi"],
                "resources": {"claims": used},
            }],
        },
    })
}

/// Returns a valid selector that costs a fifth of the API server's limit and selects all devices.
/// Another `number` makes it another expression, so no cached result serves it.
pub fn expensive_selector(number: usize) -> Value {
    let numbers = (0..170).map(|number| number.to_string()).collect::<Vec<_>>().join(",");
    let all = format!("[{numbers}].all(x, [{numbers}].all(y, x + y >= -{number}))");
    selector(&format!("{all} && device.attributes['{DRIVER}'].index >= 0"))
}

/// Returns devices that fit nowhere: eight alternatives of four different expensive selectors each.
pub fn expensive(number: usize) -> Value {
    let alternative = |index: usize| {
        let selectors = (0..4).map(|s| expensive_selector(number * 100 + index * 10 + s));
        let mut alternative = exactly("900Gi");
        alternative["name"] = format!("r{index}").into();
        alternative["selectors"] = selectors.collect();
        alternative
    };
    let alternatives: Vec<Value> = (0..8).map(alternative).collect();
    json!({"requests": [{"name": "gpu", "firstAvailable": alternatives}]})
}

/// Returns devices that fit nowhere: 32 selectors in one request, each as expensive as the API
/// server allows at run time, none of which another `number` has.
pub fn worst(number: usize) -> Value {
    let numbers = (0..400).map(|number| number.to_string()).collect::<Vec<_>>().join(",");
    let worst = |index: usize| {
        let least = number * 32 + index;
        let all = format!("[{numbers}].all(x, [{numbers}].all(y, x + y >= -{least}))");
        selector(&format!("{all} && device.attributes['{DRIVER}'].index >= 0"))
    };
    let mut exactly = exactly("900Gi");
    exactly["selectors"] = (0..32).map(worst).collect();
    json!({"requests": [{"name": "gpu", "exactly": exactly}]})
}

/// Returns a selector with an expression of 10 KB, cheap to evaluate and large when compiled.
pub fn large_selector(number: usize) -> Value {
    selector(&format!("[{}{number}].size() > 0", "1,".repeat(5000)))
}

/// Returns devices with that many large selectors, 28 in each request. Kubernetes allows 32.
pub fn large(number: usize, selectors: usize) -> Value {
    let numbers: Vec<usize> = (0..selectors).map(|s| number * 1000 + s).collect();
    let request = |(index, numbers): (usize, &[usize])| {
        let mut exactly = exactly("1Gi");
        exactly["selectors"] = numbers.iter().map(|number| large_selector(*number)).collect();
        json!({"name": format!("r{index}"), "exactly": exactly})
    };
    json!({"requests": numbers.chunks(28).enumerate().map(request).collect::<Vec<_>>()})
}
