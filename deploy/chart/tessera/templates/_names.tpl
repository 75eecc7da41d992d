{{/*
Names are fixed, not derived from the release: the driver's name is one for the whole cluster, so a second release could
only fight the first.
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

{{/* The user name that a service account of this release has towards the API server. */}}
{{- define "tessera.user" -}}
system:serviceaccount:{{ .namespace }}:{{ .account }}
{{- end }}

{{- define "tessera.scrape" -}}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .metricsPort | quote }}
prometheus.io/path: /metrics
{{- end }}
