# shellcheck shell=bash
#
# Certificates of the cluster: one CA, created by each up.sh, valid for one day.

pki_create() {
  local node
  mkdir -p "$pki"
  chmod 700 "$pki"
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=tessera-e2e \
    -keyout "$pki/ca.key" -out "$pki/ca.crt" 2>/dev/null
  openssl genrsa -out "$pki/service-account.key" 2048 2>/dev/null
  openssl rsa -in "$pki/service-account.key" -pubout -out "$pki/service-account.pub" 2>/dev/null
  pki_certificate apiserver /CN=kube-apiserver \
    "IP:127.0.0.1,IP:$service_address,IP:${address[$control_plane]},DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
  pki_certificate admin /O=system:masters/CN=admin
  pki_certificate apiserver-kubelet /O=system:masters/CN=kube-apiserver-kubelet-client
  pki_certificate controller-manager /CN=system:kube-controller-manager
  pki_certificate scheduler /CN=system:kube-scheduler
  for node in "${node_names[@]}"; do
    pki_certificate "$node" "/O=system:nodes/CN=system:node:$node" "IP:${address[$node]},DNS:$node"
  done
}

pki_certificate() { # name subject [alternative names]
  local name=$1 subject=$2 names=${3:-}
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "$subject" \
    -keyout "$pki/$name.key" -out "$pki/$name.csr" 2>/dev/null
  {
    echo "extendedKeyUsage=serverAuth,clientAuth"
    if [ -n "$names" ]; then echo "subjectAltName=$names"; fi
  } >"$pki/$name.ext"
  openssl x509 -req -in "$pki/$name.csr" -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -CAcreateserial -days 1 \
    -extfile "$pki/$name.ext" -out "$pki/$name.crt" 2>/dev/null
}

# Writes a kubeconfig with inline credentials.
pki_kubeconfig() { # certificate name, file
  cat >"$2" <<END
apiVersion: v1
kind: Config
clusters:
- name: e2e
  cluster: {server: "https://${address[$control_plane]}:443", certificate-authority-data: $(base64 -w0 "$pki/ca.crt")}
users:
- name: $1
  user: {client-certificate-data: $(base64 -w0 "$pki/$1.crt"), client-key-data: $(base64 -w0 "$pki/$1.key")}
contexts:
- name: e2e
  context: {cluster: e2e, user: $1}
current-context: e2e
END
  chmod 600 "$2"
}
