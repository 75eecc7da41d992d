//! The admission webhook over TLS, and the objects that the leader writes for it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use fake_api::FakeApi;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use prometheus_client::registry::Registry;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tessera_admission::certificates::{Certificates, LIFETIME, TRUST_DELAY};
use tessera_controller::webhook::certificate::{ServedCertificate, follow};
use tessera_controller::webhook::publish::{CertificateSource, WebhookPublisher};
use tessera_controller::webhook::serve::{self, ServedWebhook};
use tessera_controller::webhook::settings;
use tessera_dialect::{Converter, Dialect, Settings};
use tessera_runtime::supervisor::Supervisor;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

const NAMESPACE: &str = "tessera-system";
const HOST: &str = "tessera-webhook.tessera-system.svc";
const SECRETS: &str = "secrets";
const CONFIGURATIONS: &str = "mutatingwebhookconfigurations";

const VALIDATING: &str = "validatingwebhookconfigurations";

fn converter() -> Option<Arc<Converter>> {
    Some(Arc::new(Converter::new(Settings::with_defaults(&[Dialect::Hami])).unwrap()))
}

/// A replica with the webhook, and an API server with the objects of the chart.
struct Replica {
    api: FakeApi,
    publisher: WebhookPublisher,
    served: Arc<ServedCertificate>,
    webhook: ServedWebhook,
    registry: Registry,
    /// Seconds since the epoch.
    now: Arc<AtomicI64>,
    tasks: Supervisor,
}

impl Replica {
    async fn start(source: CertificateSource) -> Self {
        Self::start_with(source, converter()).await
    }

    async fn start_with(source: CertificateSource, converter: Option<Arc<Converter>>) -> Self {
        let (api, served) = (FakeApi::new(), Arc::new(ServedCertificate::default()));
        let object = |name: &str, namespace: &str| json!({"metadata": {"name": name, "namespace": namespace, "uid": name}});
        api.put(SECRETS, object("tessera-webhook", NAMESPACE));
        api.put("configmaps", object("tessera-unconverted", NAMESPACE));
        api.put(CONFIGURATIONS, object("tessera-dialects", ""));
        api.put(VALIDATING, object("tessera-configs", ""));
        let mut tasks = Supervisor::new(CancellationToken::new());
        let (any, mut registry) = ("127.0.0.1:0".parse().unwrap(), Registry::default());
        let webhook =
            serve::serve(any, converter.clone(), served.clone(), &mut registry, &mut tasks)
                .unwrap();
        tasks.spawn("follow", follow(api.client(), NAMESPACE.to_owned(), served.clone()));
        let now = k8s_openapi::jiff::Timestamp::now().as_second();
        let now = Arc::new(AtomicI64::new(now));
        let clock = now.clone();
        let clock = move || clock.load(Ordering::Relaxed);
        let (client, of_publisher) = (api.client(), served.clone());
        let publisher =
            WebhookPublisher::new(client, NAMESPACE, converter, of_publisher, source, clock);
        Self { api, publisher, served, webhook, registry, now, tasks }
    }

    fn now(&self) -> i64 {
        self.now.load(Ordering::Relaxed)
    }

    fn pass(&self, seconds: i64) {
        self.now.fetch_add(seconds, Ordering::Relaxed);
    }

    /// Publishes until all is as wanted.
    async fn publish(&self) {
        for _ in 0..200 {
            if self.publisher.round().await.unwrap() {
                return;
            }
            tokio::task::yield_now().await;
            // The watch of the Secret runs beside.
            self.api.until("a certificate", |_| self.served.check(self.now()).ok()).await;
        }
        panic!("not published");
    }

    fn entries(&self) -> Vec<Value> {
        let object = self.api.get(CONFIGURATIONS, "", "tessera-dialects").unwrap();
        object["webhooks"].as_array().cloned().unwrap_or_default()
    }

    /// Returns the caBundle that kube-apiserver trusts.
    fn ca_bundle(&self) -> String {
        let entries = self.entries();
        let bundle = entries[0]["clientConfig"]["caBundle"].clone();
        assert!(entries.iter().all(|entry| entry["clientConfig"]["caBundle"] == bundle));
        String::from_utf8(serde_json::from_value::<ByteString>(bundle).unwrap().0).unwrap()
    }

    fn stored(&self) -> Certificates {
        let secret = self.api.get(SECRETS, NAMESPACE, "tessera-webhook").unwrap();
        let secret: Secret = serde_json::from_value(secret).unwrap();
        Certificates::from_secret(&secret.data.unwrap_or_default()).unwrap()
    }

    /// Connects as kube-apiserver with this caBundle.
    async fn connect(&self, ca_bundle: &str) -> Result<TlsStream<TcpStream>, String> {
        let mut roots = RootCertStore::empty();
        for authority in CertificateDer::pem_slice_iter(ca_bundle.as_bytes()) {
            roots.add(authority.unwrap()).unwrap();
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(self.webhook.address).await.unwrap();
        let connector = TlsConnector::from(Arc::new(config));
        let host = ServerName::try_from(HOST).unwrap();
        connector.connect(host, stream).await.map_err(|error| error.to_string())
    }

    /// Sends a request as kube-apiserver with this caBundle. Returns status and body.
    async fn send(&self, ca_bundle: &str, path: &str, body: &str) -> Result<(u16, String), String> {
        let mut stream = self.connect(ca_bundle).await?;
        stream.write_all(head(path, body.len()).as_bytes()).await.unwrap();
        stream.write_all(body.as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        answer(stream).await
    }
}

fn head(path: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    )
}

/// Returns status and body of the answer.
async fn answer(mut stream: TlsStream<TcpStream>) -> Result<(u16, String), String> {
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.map_err(|error| error.to_string())?;
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    Ok((head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned()))
}

fn request(limits: &Value) -> String {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "worker"},
        "spec": {"schedulerName": "default-scheduler", "containers": [
            {"name": "main", "image": "cuda", "resources": {"limits": limits}},
        ]},
    });
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "1", "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "name": "worker", "namespace": "team-a", "operation": "CREATE",
            "userInfo": {}, "object": pod, "dryRun": false,
        },
    })
    .to_string()
}

fn hami() -> String {
    request(&json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}))
}

#[tokio::test]
async fn a_pod_is_converted_over_tls() {
    let replica = Replica::start(CertificateSource::SelfManaged).await;
    assert!(replica.served.check(replica.now()).is_err(), "not ready");
    replica.publish().await;
    let path = replica.entries()[0]["clientConfig"]["service"]["path"].clone();
    assert_eq!(path, "/convert/hami");
    let bundle = replica.ca_bundle();
    let (status, body) = replica.send(&bundle, "/convert/hami", &hami()).await.unwrap();
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &body["response"]["allowed"]), (200, &json!(true)));
    assert_eq!(body["response"]["patchType"], "JSONPatch");
    let bad = request(&json!({"nvidia.com/gpu": "one"}));
    let (status, body) = replica.send(&bundle, "/convert/hami", &bad).await.unwrap();
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &body["response"]["allowed"]), (200, &json!(false)));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &replica.registry).unwrap();
    for result in ["converted", "refused"] {
        let line = format!(
            "tessera_controller_admission_reviews_total{{dialect=\"hami\",result=\"{result}\"}} 1"
        );
        assert!(text.contains(&line), "{text}");
    }
}

#[tokio::test]
async fn a_burst_gets_a_connection_for_each_pod() {
    let replica = Replica::start(CertificateSource::SelfManaged).await;
    replica.publish().await;
    let (bundle, body) = (replica.ca_bundle(), hami());
    // All are open before the first request.
    let mut open = Vec::new();
    for _ in 0..200 {
        open.push(replica.connect(&bundle).await.unwrap());
    }
    for stream in &mut open {
        stream.write_all(head("/convert/hami", body.len()).as_bytes()).await.unwrap();
        stream.write_all(body.as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
    }
    for stream in open {
        assert_eq!(answer(stream).await.unwrap().0, 200);
    }
}

#[tokio::test]
async fn a_connection_serves_one_request_after_the_other() {
    let replica = Replica::start(CertificateSource::SelfManaged).await;
    replica.publish().await;
    let body = hami();
    let mut stream = replica.connect(&replica.ca_bundle()).await.unwrap();
    let kept = head("/convert/hami", body.len()).replace("Connection: close\r\n", "");
    stream.write_all((kept + &body).as_bytes()).await.unwrap();
    let mut first = vec![0; 12];
    stream.read_exact(&mut first).await.unwrap();
    assert_eq!(first, b"HTTP/1.1 200");
    stream.write_all((head("/convert/hami", body.len()) + &body).as_bytes()).await.unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await.unwrap();
    let rest = String::from_utf8(rest).unwrap();
    assert_eq!(rest.matches("HTTP/1.1 200").count(), 1, "the second answer: {rest}");
}

#[tokio::test]
async fn without_dialects_only_configs_are_validated() {
    let replica = Replica::start_with(CertificateSource::SelfManaged, None).await;
    replica.publish().await;
    assert_eq!(replica.entries(), Vec::<Value>::new());
    let object = replica.api.get(VALIDATING, "", "tessera-configs").unwrap();
    let bundle = object["webhooks"][0]["clientConfig"]["caBundle"].clone();
    let bundle = serde_json::from_value::<ByteString>(bundle).unwrap();
    let bundle = String::from_utf8(bundle.0).unwrap();
    assert_eq!(replica.send(&bundle, "/convert/hami", &hami()).await.unwrap().0, 404);
    let (status, body) = replica.send(&bundle, "/validate", &hami()).await.unwrap();
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &body["response"]["allowed"]), (200, &json!(true)), "no config");
}

#[tokio::test]
async fn requests_that_are_no_reviews_get_an_error() {
    let replica = Replica::start(CertificateSource::SelfManaged).await;
    replica.publish().await;
    let bundle = replica.ca_bundle();
    let send = async |path: &str, body: &str| replica.send(&bundle, path, body).await;
    assert_eq!(send("/convert/hami", "{}").await.unwrap().0, 400);
    assert_eq!(send("/convert/nothing", &hami()).await.unwrap().0, 404);
    assert_eq!(send("/", &hami()).await.unwrap().0, 404);
    let large = " ".repeat(300 << 10) + &hami();
    assert_eq!(send("/convert/hami", &large).await.unwrap().0, 200);
    let too_large = " ".repeat(7 << 20);
    // The server may close the connection before it has read all.
    let answer = send("/convert/hami", &too_large).await;
    assert!(matches!(answer, Err(_) | Ok((413, _))), "{answer:?}");
}

#[tokio::test]
async fn a_rotation_needs_no_restart_and_no_pause() {
    let replica = Replica::start(CertificateSource::SelfManaged).await;
    replica.publish().await;
    let (first, old_bundle) = (replica.stored(), replica.ca_bundle());
    replica.pass(LIFETIME - LIFETIME / 3 + 1);
    replica.publish().await;
    let bundle = replica.ca_bundle();
    assert_eq!(replica.stored().validity(), first.validity(), "the next one is not served");
    assert!(bundle.starts_with(&old_bundle) && bundle != old_bundle, "but trusted");
    assert_eq!(replica.send(&bundle, "/convert/hami", &hami()).await.unwrap().0, 200);
    replica.pass(TRUST_DELAY);
    replica.publish().await;
    assert_ne!(replica.stored().validity(), first.validity());
    let validity = replica.stored().validity();
    let is_served =
        |_: &FakeApi| (replica.served.expiry().get() == validity.not_after).then_some(());
    replica.api.until("the next certificate", is_served).await;
    // The client here has the real clock, by which the next one is not valid yet: the error says
    // that the server has it.
    let error = replica.send(&replica.ca_bundle(), "/convert/hami", &hami()).await.unwrap_err();
    assert!(error.contains("not valid yet"), "{error}");
}

#[tokio::test]
async fn changes_of_others_last_one_round() {
    let replica = Replica::start(CertificateSource::SelfManaged).await;
    replica.publish().await;
    let (entries, bundle) = (replica.entries(), replica.ca_bundle());
    let validating = replica.api.get(VALIDATING, "", "tessera-configs").unwrap();
    assert_eq!(validating["webhooks"][0]["failurePolicy"], "Ignore");
    let of_validating = &validating["webhooks"][0]["clientConfig"];
    assert_eq!(of_validating["caBundle"], entries[0]["clientConfig"]["caBundle"]);
    let mut without = validating.clone();
    without["webhooks"] = json!([]);
    replica.api.put(VALIDATING, without);
    let guard = replica.api.get("configmaps", NAMESPACE, "tessera-unconverted").unwrap();
    assert!(guard["data"]["hami.resources"].as_str().unwrap().contains("nvidia.com/gpu"));
    let mut changed = replica.api.get(CONFIGURATIONS, "", "tessera-dialects").unwrap();
    changed["webhooks"][0]["clientConfig"]["caBundle"] = "AAAA".into();
    changed["webhooks"][1]["failurePolicy"] = "Ignore".into();
    replica.api.put(CONFIGURATIONS, changed);
    let mut emptied = guard.clone();
    emptied["data"]["default"] = "".into();
    replica.api.put("configmaps", emptied);
    replica.publish().await;
    assert_eq!(replica.entries(), entries);
    assert_eq!(replica.ca_bundle(), bundle, "the certificate stays");
    let corrected = replica.api.get("configmaps", NAMESPACE, "tessera-unconverted").unwrap();
    assert_eq!(corrected["data"], guard["data"]);
    let corrected = replica.api.get(VALIDATING, "", "tessera-configs").unwrap();
    assert_eq!(corrected["webhooks"], validating["webhooks"]);
    let writes = replica.api.writes().len();
    replica.publish().await;
    assert_eq!(replica.api.writes().len(), writes, "a round without a difference writes nothing");
}

#[tokio::test]
async fn a_secret_that_cannot_be_read_is_replaced() {
    let replica = Replica::start(CertificateSource::SelfManaged).await;
    replica.publish().await;
    let mut broken = replica.api.get(SECRETS, NAMESPACE, "tessera-webhook").unwrap();
    broken["data"] = json!({"tls.crt": "AAAA", "stale": "AAAA"});
    replica.api.put(SECRETS, broken);
    replica.publish().await;
    let stored = replica.stored();
    let is_served =
        |_: &FakeApi| (replica.served.expiry().get() == stored.validity().not_after).then_some(());
    replica.api.until("the new certificate", is_served).await;
    assert_eq!(replica.ca_bundle(), stored.ca_bundle());
    let data = replica.api.get(SECRETS, NAMESPACE, "tessera-webhook").unwrap()["data"].clone();
    assert!(data.get("stale").is_none());
    let (status, _) = replica.send(&replica.ca_bundle(), "/convert/hami", &hami()).await.unwrap();
    assert_eq!(status, 200);
}

#[tokio::test]
async fn an_external_certificate_and_its_ca_bundle_stay() {
    let replica = Replica::start(CertificateSource::External).await;
    assert!(!replica.publisher.round().await.unwrap(), "no certificate yet");
    assert_eq!(replica.entries(), Vec::<Value>::new());
    let made = Certificates::renewed(None, HOST, None, replica.now()).unwrap().unwrap();
    let mut secret = replica.api.get(SECRETS, NAMESPACE, "tessera-webhook").unwrap();
    secret["data"] = json!(made.to_secret());
    replica.api.put(SECRETS, secret.clone());
    replica.publish().await;
    assert!(replica.entries()[0]["clientConfig"].get("caBundle").is_none());
    let mut injected = replica.api.get(CONFIGURATIONS, "", "tessera-dialects").unwrap();
    for entry in injected["webhooks"].as_array_mut().unwrap() {
        entry["clientConfig"]["caBundle"] = json!(ByteString(made.ca_bundle().into_bytes()));
    }
    replica.api.put(CONFIGURATIONS, injected);
    replica.pass(LIFETIME * 2 / 3 + 10);
    replica.publish().await;
    assert_eq!(replica.ca_bundle(), made.ca_bundle(), "of the other program");
    let writes = replica.api.writes();
    assert!(writes.iter().all(|write| !write.path.contains(SECRETS)), "{writes:?}");
}

#[tokio::test]
async fn a_review_that_has_begun_is_answered_while_it_stops() {
    let replica = Replica::start(CertificateSource::SelfManaged).await;
    replica.publish().await;
    let mut stream = replica.connect(&replica.ca_bundle()).await.unwrap();
    let body = hami();
    let (first, rest) = body.split_at(100);
    stream.write_all(head("/convert/hami", body.len()).as_bytes()).await.unwrap();
    stream.write_all(first.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
    // A second connection is answered after the first one was read.
    assert_eq!(replica.send(&replica.ca_bundle(), "/convert/hami", &body).await.unwrap().0, 200);
    replica.tasks.stop_token().cancel();
    let Replica { webhook, .. } = replica;
    let ended = tokio::spawn(webhook.ended());
    stream.write_all(rest.as_bytes()).await.unwrap();
    assert_eq!(answer(stream).await.unwrap().0, 200);
    ended.await.unwrap();
}

#[test]
fn errors_of_the_settings_file_name_file_and_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dialects.yaml");
    let error = |text: &str| {
        std::fs::write(&path, text).unwrap();
        let error = settings::read(&path).unwrap_err();
        let source = std::error::Error::source(&error).map(ToString::to_string);
        format!("{error}: {}", source.unwrap_or_default())
    };
    assert!(error("dialect: {}").contains("dialect"));
    let text = error("default: [hami]");
    assert!(text.contains("dialects.yaml: default: hami: there is no entry"), "{text}");
    std::fs::write(&path, "default: [hami]\ndialects: {hami: {}}").unwrap();
    assert!(!settings::read(&path).unwrap().triggers().is_empty());
    std::fs::remove_file(&path).unwrap();
    assert!(settings::read(&path).unwrap_err().to_string().contains("cannot read --dialects"));
}
