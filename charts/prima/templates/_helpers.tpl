{{- /* Names */}}

{{- define "prima.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride }}
{{- else if contains "prima" .Release.Name }}
{{- .Release.Name }}
{{- else }}
{{- printf "%s-prima" .Release.Name }}
{{- end }}
{{- end }}

{{- define "prima.operator.name" -}}
{{ include "prima.fullname" . }}-operator
{{- end }}

{{- define "prima.agent.name" -}}
{{ include "prima.fullname" . }}-agent
{{- end }}

{{- define "prima.agent.namespace" -}}
{{ default .Release.Namespace .Values.agent.namespace }}
{{- end }}

{{- define "prima.agent.serviceAccount" -}}
system:serviceaccount:{{ include "prima.agent.namespace" . }}:{{ include "prima.agent.name" . }}
{{- end }}

{{- /* Labels. Selectors: (dict "context" $ "component" "operator") */}}

{{- define "prima.selectorLabels" -}}
app.kubernetes.io/name: prima
app.kubernetes.io/instance: {{ .context.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "prima.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .context.Chart.Name .context.Chart.Version | replace "+" "_" }}
{{ include "prima.selectorLabels" . }}
app.kubernetes.io/version: {{ .context.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .context.Release.Service }}
{{- end }}

{{- /* Pods */}}

{{- /* (dict "context" $ "image" .Values.operator.image) */}}
{{- define "prima.image" -}}
{{- $tag := default .context.Chart.AppVersion .context.Values.image.tag -}}
{{ .context.Values.global.imageRegistry | default .context.Values.image.registry }}/{{ .image.repository }}:{{ $tag }}{{ with .image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- define "prima.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "prima.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /*
On machines at full load, and on slow ones that start, an answer takes longer than the default of a second. A container that
does not come up within five minutes is restarted; one that came up, after a minute of silence.
*/}}
{{- define "prima.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
{{- end }}

{{- /* What the operator and the agents read from the environment: (dict "context" $ "service" "name") */}}
{{- define "prima.env" -}}
- name: RUST_LOG
  value: {{ .context.Values.logLevel | quote }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- with .context.Values.huggingFace.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with .context.Values.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.context.Values.huggingFace.existingSecretKey }}
{{- end }}
{{- with .context.Values.allowedServers }}
- name: PRIMA_ALLOWED_SERVERS
  value: {{ join "," . | quote }}
{{- end }}
{{- with .context.Values.otel.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
- name: OTEL_SERVICE_NAME
  value: {{ $.service }}
{{- $chosen := false }}
{{- range $.context.Values.agent.extraEnv }}
{{- $chosen = or $chosen (eq .name "OTEL_TRACES_SAMPLER") }}
{{- end }}
{{- if and (eq $.service "prima-node-agent") (not $chosen) }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ $.context.Values.otel.sampledRequests | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Where a component's pods run: its values. */}}
{{- define "prima.scheduling" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
