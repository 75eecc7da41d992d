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
