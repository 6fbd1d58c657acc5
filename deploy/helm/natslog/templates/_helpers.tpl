{{- define "natslog.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "natslog.labels" -}}
app.kubernetes.io/name: natslog
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "natslog.selector" -}}
app.kubernetes.io/name: natslog
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: broker
{{- end }}

{{- define "natslog.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "natslog.scheme" -}}
{{ if .Values.tlsSecret }}https{{ else }}http{{ end }}
{{- end }}

{{- define "natslog.secret" -}}
{{ .Values.clusterSecret | default (printf "%s-cluster" (include "natslog.name" .)) }}
{{- end }}

{{- /* URLs of the first brokers: natslog-0 is broker 1. */ -}}
{{- define "natslog.urls" -}}
{{- $name := include "natslog.name" . -}}
{{- $urls := list -}}
{{- range $at := until (int .Values.seeds) -}}
{{- $urls = append $urls (printf "%s://%s-%d.%s.%s.svc:9292" (include "natslog.scheme" $) $name $at $name $.Release.Namespace) -}}
{{- end -}}
{{ join "," $urls }}
{{- end }}

{{- define "natslog.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
