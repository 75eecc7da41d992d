{{/*
Names are fixed, not derived from the release: the driver's name is unique in the cluster, so a second
release would conflict with the first.
*/}}
{{- define "tessera.labels" -}}
app.kubernetes.io/part-of: tessera
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "tessera.image" -}}
{{ .image.repository }}:{{ .image.tag | default .chart.AppVersion }}
{{- end }}

{{/* The API server's user name of a service account of this release. */}}
{{- define "tessera.user" -}}
system:serviceaccount:{{ .namespace }}:{{ .account }}
{{- end }}

{{- define "tessera.scrape" -}}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .metricsPort | quote }}
prometheus.io/path: /metrics
{{- end }}

{{/*
Object with the managed taint: `taint` or `rule`; empty in mode stock. `Capabilities` of
`helm template` are those of no cluster unless --kube-version and --api-versions are given.
*/}}
{{- define "tessera.fence" -}}
{{- if eq .Values.mode "managed" }}
{{- if eq .Values.fence "auto" }}
{{- .Capabilities.APIVersions.Has "resource.k8s.io/v1/DeviceTaintRule" | and .Values.admissionPolicies.enabled | ternary "rule" "taint" }}
{{- else }}
{{- if eq .Values.fence "rule" }}
{{- if not .Values.admissionPolicies.enabled }}
{{- fail "fence=rule requires admissionPolicies.enabled: without the policies nothing but the rule excludes other allocators" }}
{{- end }}
{{- if semverCompare "<1.37.0-0" .Capabilities.KubeVersion.Version }}
{{- fail (printf "fence=rule requires Kubernetes 1.37 or newer, and this is %s: kube-scheduler would not honour the DeviceTaintRule; use fence=taint" .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- end }}
{{- .Values.fence }}
{{- end }}
{{- end }}
{{- end }}

{{/* The drivers whose devices tessera-controller allocates, as a JSON list. */}}
{{- define "tessera.managedDrivers" -}}
{{- $others := without .Values.managedDrivers "gpu.tessera.dev" -}}
{{- if and $others (ne .Values.mode "managed") }}
{{- fail "managedDrivers requires mode=managed: in mode stock kube-scheduler allocates all devices" }}
{{- end }}
{{- if and $others (ne (include "tessera.fence" .) "rule") }}
{{- fail "managedDrivers requires the fence `rule`: Kubernetes 1.37 or newer, admissionPolicies.enabled, and fence auto or rule" }}
{{- end }}
{{- prepend $others "gpu.tessera.dev" | toJson }}
{{- end }}

{{/* The managed drivers as a list of CEL, and as text. */}}
{{- define "tessera.managedDriversCel" -}}
{{- include "tessera.managedDrivers" . | replace "\"" "'" }}
{{- end }}
{{- define "tessera.managedDriversText" -}}
{{- include "tessera.managedDrivers" . | fromJsonArray | join ", " }}
{{- end }}

{{/* The name of the DeviceTaintRule of a driver. */}}
{{- define "tessera.fenceName" -}}
{{- eq . "gpu.tessera.dev" | ternary "tessera-fence" (printf "tessera-fence.%s" .) }}
{{- end }}

{{/* The name of the policy that protects this rule, and owns it once it was restored. */}}
{{- define "tessera.fencePolicy" -}}
{{- eq . "gpu.tessera.dev" | ternary "tessera-fence-rule" (printf "tessera-fence-rule.%s" .) }}
{{- end }}

{{/* The names of the rules, and of their policies, as JSON lists. */}}
{{- define "tessera.fenceNames" -}}
{{- $names := list }}
{{- range include "tessera.managedDrivers" . | fromJsonArray }}{{ $names = append $names (include "tessera.fenceName" .) }}{{ end }}
{{- $names | toJson }}
{{- end }}
{{- define "tessera.fencePolicies" -}}
{{- $names := list }}
{{- range include "tessera.managedDrivers" . | fromJsonArray }}{{ $names = append $names (include "tessera.fencePolicy" .) }}{{ end }}
{{- $names | toJson }}
{{- end }}

{{/* The DeviceTaintRule that excludes kube-scheduler from the devices of a driver. */}}
{{- define "tessera.fenceRule" -}}
apiVersion: resource.k8s.io/v1
kind: DeviceTaintRule
metadata:
  name: {{ include "tessera.fenceName" .driver }}
  labels: {{- include "tessera.labels" .chart | nindent 4 }}
spec:
  deviceSelector: {driver: {{ .driver }}}
  taint: {key: gpu.tessera.dev/managed, effect: NoSchedule}
{{- end }}

{{/* The file of --node-groups. */}}
{{- define "tessera.nodeGroups" -}}
image: {{ .Values.autoscaler.placeholderImage | quote }}
priorityClassName: tessera-placeholder
groups: {{- toYaml .Values.autoscaler.nodeGroups | nindent 0 }}
{{- end }}

{{/* The file of --fence-rules: the rules with the annotations by which helm knows its objects. */}}
{{- define "tessera.fenceRules" -}}
{{- $rules := list }}
{{- range $driver := include "tessera.managedDrivers" . | fromJsonArray }}
{{- $rule := include "tessera.fenceRule" (dict "driver" $driver "chart" $) | fromYaml }}
{{- $_ := set $rule.metadata "annotations" (dict "meta.helm.sh/release-name" $.Release.Name "meta.helm.sh/release-namespace" $.Release.Namespace) }}
{{- $rules = append $rules $rule }}
{{- end }}
{{- toYaml $rules }}
{{- end }}

{{/*
The settings file of the dialects: each one of `default` has an entry.
*/}}
{{- define "tessera.dialects" -}}
{{- $settings := deepCopy .Values.dialects.settings -}}
{{- range .Values.dialects.default -}}
{{- if not (hasKey $settings .) -}}{{- $_ := set $settings . dict -}}{{- end -}}
{{- end -}}
{{- dict "deviceClass" .Values.dialects.deviceClass "default" .Values.dialects.default "dialects" $settings | toYaml -}}
{{- end -}}

{{- /* JSON list of the extended resources of the DeviceClasses. */}}
{{- define "tessera.extendedResources" -}}
{{- $names := list }}
{{- with .Values.extendedResourceName }}{{ $names = append $names . }}{{ end }}
{{- range $class := .Values.deviceClasses }}
{{- with $class.extendedResourceName }}{{ $names = append $names . }}{{ end }}
{{- end }}
{{- toJson $names }}
{{- end }}
