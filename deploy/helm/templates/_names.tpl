{{- define "k8e.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "k8e.account" -}}
{{ .Values.serviceAccount.name | default (include "k8e.name" .) }}
{{- end }}

{{- define "k8e.secret" -}}
{{ .Values.keySecret | default (printf "%s-key" (include "k8e.name" .)) }}
{{- end }}

{{- /* Roles of the whole cluster: two releases must not meet. */ -}}
{{- define "k8e.global" -}}
{{ printf "%s-%s" .Release.Namespace (include "k8e.name" .) }}
{{- end }}

{{- define "k8e.several" -}}
{{ if gt (int .Values.gateway.replicas) 1 }}yes{{ end }}
{{- end }}

{{- define "k8e.selector" -}}
app.kubernetes.io/name: k8e
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Not "k8e" as managed-by: that marks the objects of sandboxes. */ -}}
{{- define "k8e.labels" -}}
{{ include "k8e.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "k8e.image" -}}
{{- $images := .root.Values.images -}}
{{- if .digest -}}
{{ printf "%s/k8e-%s@%s" $images.registry .kind .digest }}
{{- else -}}
{{ printf "%s/k8e-%s:%s" $images.registry .kind ($images.tag | default .root.Chart.AppVersion) }}
{{- end -}}
{{- end }}

{{- define "k8e.gatewayImage" -}}
{{ include "k8e.image" (dict "root" . "kind" "gateway" "digest" .Values.images.gatewayDigest) }}
{{- end }}

{{- define "k8e.agentImage" -}}
{{ include "k8e.image" (dict "root" . "kind" "agent" "digest" .Values.images.agentDigest) }}
{{- end }}

{{- /* What a pod of the gateway's image may do. */ -}}
{{- define "k8e.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "k8e.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /* Below the volumes' own directories, which are root's. */ -}}
{{- define "k8e.environment" -}}
- name: K8E_STATE_DIR
  value: /var/lib/k8e/gateway
- name: K8E_RUN_DIR
  value: /run/k8e/gateway
{{- if include "k8e.several" . }}
- name: K8E_POD_IP # which the other gateways are told
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end }}
{{- end }}

{{- define "k8e.mounts" -}}
- name: settings
  mountPath: /etc/k8e
  readOnly: true
- name: state
  mountPath: /var/lib/k8e
- name: run
  mountPath: /run/k8e
- name: tmp
  mountPath: /tmp
{{- end }}

{{- define "k8e.volumes" -}}
- name: settings
  configMap:
    name: {{ include "k8e.name" . }}
- name: run
  emptyDir:
    medium: Memory
    sizeLimit: 16Mi
- name: tmp
  emptyDir:
    sizeLimit: 256Mi
{{- end }}
